"""A torchvision model and a torchvision data set."""

from torchvision import transforms
from torchvision.datasets import FakeData
from torchvision.models import resnet18

import dtrain


def my_data():
    change = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    return FakeData(128, (3, 32, 32), num_classes=10, transform=change)


if __name__ == "__main__":
    model = (resnet18, {"num_classes": 10})
    dtrain.fit(model=model, data=my_data, loss="cross_entropy", strategy="fsdp", processes=2, epochs=1)
