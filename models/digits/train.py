"""Training of the network, which writes triton_repo/core/1/model.onnx.

    python -m models.digits.train

Only this module needs torch; see README.md in this folder.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import nn

from .augmenting import training_set
from .export import Layer, write
from .serving import MODEL, FloatArray, IntArray

SEED = 20
EPOCHS = 14
BATCH = 256
PEAK_LEARNING_RATE = 4e-3
# Without smoothing, the network is overconfident and never marks an image as doubtful.
LABEL_SMOOTHING = 0.02

log = logging.getLogger(__name__)


def network() -> nn.Sequential:
    """Return the network, which maps [n, 1, 16, 16] to [n, 10] scores."""
    return nn.Sequential(
        *_convolution(1, 16),
        *_convolution(16, 32),
        nn.MaxPool2d(2),
        *_convolution(32, 32),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(64, 10),
    )


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()


def trained(tensors: FloatArray, labels: IntArray) -> nn.Sequential:
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    net = network()
    x, y = torch.from_numpy(tensors), torch.from_numpy(labels)
    steps = -(-len(x) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LEARNING_RATE, epochs=EPOCHS, steps_per_epoch=steps
    )
    for epoch in range(EPOCHS):
        losses = []
        for batch in torch.split(torch.randperm(len(x)), BATCH):
            scores = net(x[batch])
            loss = nn.functional.cross_entropy(scores, y[batch], label_smoothing=LABEL_SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        log.info("epoch %d of %d: loss %.4f", epoch + 1, EPOCHS, np.mean(losses))
    return net.eval()


def layers(net: nn.Sequential) -> list[Layer]:
    """Return weights and biases, with each batch normalisation folded into its convolution."""
    folded: list[Layer] = []
    for module in net:
        if isinstance(module, nn.BatchNorm2d):
            folded[-1] = _folded(folded[-1], module)
        elif isinstance(module, nn.Conv2d | nn.Linear):
            folded.append(Layer(_array(module.weight), _array(module.bias)))
    return folded


def _folded(layer: Layer, norm: nn.BatchNorm2d) -> Layer:
    factor = _array(norm.weight) / np.sqrt(_array(norm.running_var) + norm.eps)
    weight = layer.weight * factor[:, np.newaxis, np.newaxis, np.newaxis]
    return Layer(weight, (layer.bias - _array(norm.running_mean)) * factor + _array(norm.bias))


def _array(tensor: torch.Tensor | None) -> FloatArray:
    assert tensor is not None
    return tensor.detach().numpy()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tensors, labels = training_set(SEED)
    log.info("training on %d tensors", len(tensors))
    write(layers(trained(tensors, labels)), MODEL)
    log.info("wrote %s, %d bytes", MODEL.name, MODEL.stat().st_size)


if __name__ == "__main__":
    main()
