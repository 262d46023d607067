"""TensorFlow's MultiWorkerMirroredStrategy on 1,437 handwritten digits: each worker computes a part of every batch.

python launch.py recipe=tf-multiworker-digits starts it on two workers. It knows two things of dtrain, both optional:
where to save, and when to stop. TF_CONFIG, which dtrain sets, is all that TensorFlow needs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import tensorflow as tf
import tf_keras as keras

import dtrain
from dtrain import script


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The digits inside dtrain's package, (training, held out): every fifth is held out."""
    with np.load(Path(dtrain.__file__).with_name("data") / "digits.npz", allow_pickle=False) as file:
        pictures, labels = file["pictures"][..., None].astype("float32") / 16, file["labels"].astype("int64")
    held_out = np.arange(len(labels)) % 5 == 0
    return (pictures[~held_out], labels[~held_out]), (pictures[held_out], labels[held_out])


def model(lr: float) -> keras.Model:
    net = keras.Sequential([
        keras.layers.Conv2D(16, 3, padding="same", activation="relu", input_shape=(8, 8, 1)),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer=keras.optimizers.Adam(lr), loss=loss, metrics=["accuracy"])
    return net


class DtrainCallback(keras.callbacks.Callback):
    """Report each epoch to dtrain, and stop after the epoch in which a stop was asked for."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        logs = logs or {}
        script.log(epoch + 1, loss=float(logs["loss"]), accuracy=float(logs["accuracy"]))
        if script.stop_requested():
            script.exit_stopped()  # BackupAndRestore, which comes first, has saved the epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=60, help="of all workers together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--least-accuracy", type=float, default=0.0, help="of the held-out digits; less is an error")
    options = parser.parse_args()

    keras.utils.set_random_seed(0)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    (pictures, labels), held_out = digits()
    data = tf.data.Dataset.from_tensor_slices((pictures, labels)).shuffle(len(labels), seed=0).repeat()
    data = data.batch(options.batch_size, drop_remainder=True)
    sharding = tf.data.Options()
    sharding.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    with strategy.scope():
        net = model(options.lr)
    backup = script.checkpoint_dir() / "backup"  # TensorFlow itself gives each worker its own part of it
    net.fit(
        data.with_options(sharding),
        epochs=options.epochs,
        steps_per_epoch=len(labels) // options.batch_size,
        callbacks=[keras.callbacks.BackupAndRestore(str(backup), delete_checkpoint=False), DtrainCallback()],
        verbose=2 if script.rank() == 0 else 0,
    )
    val = tf.data.Dataset.from_tensor_slices(held_out).batch(60).with_options(sharding)
    loss, accuracy = net.evaluate(val, verbose=0)
    if script.rank() == 0:
        print(f"held out: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
        script.log(options.epochs, val_loss=loss, val_accuracy=accuracy)
    if accuracy < options.least_accuracy:
        raise SystemExit(f"the accuracy is {accuracy:.4f}, less than {options.least_accuracy}")


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    main()
