"""Arrays of scikit-learn, divided by train_test_split."""

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import Linear

import dtrain


def my_data():
    return train_test_split(*load_digits(return_X_y=True), test_size=0.25, random_state=0)


if __name__ == "__main__":
    model = (Linear, {"in_features": 64, "out_features": 10})
    dtrain.fit(model=model, data=my_data, loss="cross_entropy", strategy="fsdp", processes=2, epochs=1)
