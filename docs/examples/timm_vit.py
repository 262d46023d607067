"""A timm model by its name."""

import timm
import torch

import dtrain


def my_model():
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=10)


def my_data():
    return torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))


if __name__ == "__main__":
    dtrain.fit(model=my_model, data=my_data, loss="cross_entropy", strategy="fsdp", processes=2, epochs=1)
