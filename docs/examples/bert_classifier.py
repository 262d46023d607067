"""Hugging Face's BERT as a classifier, on a datasets.Dataset with a validation split."""

from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification

import dtrain

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def my_model():
    return BertForSequenceClassification(BertConfig(num_labels=3, **SIZES))


def my_data():
    rows = [{"input_ids": [n % 64] * 16, "attention_mask": [1] * 16, "labels": n % 3} for n in range(320)]
    return Dataset.from_list(rows).train_test_split(test_size=64, seed=0)


if __name__ == "__main__":
    dtrain.fit(model=my_model, data=my_data, strategy="fsdp", processes=2, epochs=1)
