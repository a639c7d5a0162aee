"""A CNN trained on images that two worker processes load."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLASSES, IMAGES, BATCH = 10, 512, 64


class Images(Dataset):
    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 96, 96), at / IMAGES), at % CLASSES


def block(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)
    )


def main() -> None:
    torch.manual_seed(0)
    # One algorithm for each convolution: a choice by time would launch other kernels each run.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    model = nn.Sequential(
        block(3, 64), block(64, 128), block(128, 256), nn.Flatten(), nn.Linear(256 * 144, CLASSES)
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(Images(), batch_size=BATCH, num_workers=2, pin_memory=True)
    for images, labels in loader:
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
