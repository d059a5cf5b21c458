"""The numbers of a drafted recipe: model, tokens, batch and learning rate for a corpus, a machine and a time.

    FLOP/s x time -> C -> model and tokens of least loss -> at most 4 epochs -> batch and rate for C

Sources: the size for an amount of compute, ``hlat.planner.purchase`` (Hoffmann et al. 2022, as fitted by Besiroglu et
al. 2024). Up to 4 epochs of the same text are nearly as good as new text: Muennighoff et al. 2023 (arXiv 2305.16264).
Batch and learning rate by compute: DeepSeek LLM (arXiv 2401.02954), equation 1, fitted from 1e17 to 2e19 FLOPs and used
outside of that range here; rates are limited to those that small models are known to bear.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from hlat.config import ModelConfig
from hlat.draft.machine import Machine
from hlat.draft.texts import Texts
from hlat.model import count_parameters, flops_per_token
from hlat.planner import CHINCHILLA

STATE_BYTES = 18
"""Bytes per parameter of weights, gradients and AdamW's state in mixed precision: the 16 of ZeRO (Rajbhandari et al.
2020), with gradients accumulated in fp32."""
MOST_EPOCHS = 4
"""Passes over the same text that help nearly as much as new text."""
_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, table 3
_LARGEST_RATE, _CONTINUED = 3e-3, 0.1  # a model that is trained already continues at a tenth of the rate
_SEQUENCES = ((3e7, 512), (3e8, 1024), (3e9, 2048))  # parameters below which samples are this long; then 4096
_VOCABULARIES = ((2e7, 4096), (2e8, 8192), (2e9, 16384))  # bytes of text below which a vocabulary is trained this large
_LARGEST_VOCABULARY = 32768


@dataclass(frozen=True)
class Sizes:
    """Numbers of a run.

    Attributes:
        model: fields of the model section; empty for a model that is given.
        parameters: its parameters.
        vocab_size: its vocabulary.
        epoch_tokens: estimated tokens of the corpus.
        tokens: training tokens.
        sequence_length: tokens per sample.
        global_batch: samples per step.
        micro_batch: samples at a time on one device.
        learning_rate: peak rate.
        seconds: expected duration of the training.
    """

    model: dict[str, Any]
    parameters: int
    vocab_size: int
    epoch_tokens: int
    tokens: int
    sequence_length: int
    global_batch: int
    micro_batch: int
    learning_rate: float
    seconds: float

    @property
    def steps(self) -> int:
        """Training steps."""
        return max(1, self.tokens // (self.global_batch * self.sequence_length))


def vocabulary_for(text_bytes: int) -> int:
    """Return the size of the vocabulary to train on a corpus."""
    return next((size for limit, size in _VOCABULARIES if text_bytes < limit), _LARGEST_VOCABULARY)


def choose_sizes(
    texts: Texts, epoch_tokens: int, machine: Machine, hours: float, given: ModelConfig | None, *, trained: bool
) -> Sizes:
    """Choose the numbers of a run.

    Args:
        texts: the corpus.
        epoch_tokens: its tokens.
        machine: the devices.
        hours: time to train.
        given: the model; None chooses one.
        trained: True if the model starts from trained weights.
    """
    flops = machine.rate * hours * 3600
    vocab_size = given.vocab_size if given is not None else vocabulary_for(texts.text_bytes)
    model = given or _shape_for(min(_wanted_parameters(flops, epoch_tokens), _most_parameters(machine)), vocab_size)
    parameters = count_parameters(model).total
    length = next((one for limit, one in _SEQUENCES if parameters < limit), 4096)
    length = min(length, model.max_sequence_length or length)
    per_token = flops_per_token(model, length)
    tokens = int(min(flops / per_token, MOST_EPOCHS * epoch_tokens))
    spent = tokens * per_token
    batch = _batch(spent, tokens, length, machine.devices)
    rate = min(_LARGEST_RATE, 0.3118 * spent**-0.125) * (_CONTINUED if trained else 1.0)
    return Sizes(
        model={} if given is not None else _fields(model),
        parameters=parameters,
        vocab_size=vocab_size,
        epoch_tokens=epoch_tokens,
        tokens=max(tokens, batch * length),
        sequence_length=length,
        global_batch=batch,
        micro_batch=_micro_batch(batch // machine.devices, parameters, length, machine),
        learning_rate=float(f"{rate:.1e}"),
        seconds=spent / machine.rate,
    )


def _wanted_parameters(flops: float, epoch_tokens: int) -> float:
    """Parameters for the compute, but no more than the text can train."""
    best, _ = CHINCHILLA.optimal_size(flops)
    return min(best, MOST_EPOCHS * epoch_tokens / _TOKENS_PER_PARAMETER)


def _most_parameters(machine: Machine) -> float:
    """Parameters whose training state takes at most half of the memory of all devices."""
    return machine.devices * machine.memory_bytes / 2 / STATE_BYTES


def _batch(flops: float, tokens: int, length: int, devices: int) -> int:
    """Samples per step: a multiple of the devices, and small enough for 200 steps."""
    wanted = min(0.2920 * flops**0.3271, tokens / 200) / length
    size = devices
    while 2 * size <= wanted:
        size *= 2
    return size


def _micro_batch(most: int, parameters: int, length: int, machine: Machine) -> int:
    """Samples at a time: what a fifth of the memory holds, and at most 4,096 tokens on a CPU, whose caches are small.

    A sample keeps about 34 bytes per token, layer and unit of width (Korthikanti et al. 2022, equation 2, without the
    scores of attention); layers times width is about 5 times the root of the parameters, as in LLaMA 7B.
    """
    tokens = machine.memory_bytes / 5 / (34 * 5 * parameters**0.5)
    if machine.is_host:
        tokens = min(tokens, 4096)
    size = 1
    while 2 * size <= most and 2 * size * length <= tokens:
        size *= 2
    return size


def _shape_for(parameters: float, vocab_size: int) -> ModelConfig:
    """Return the shape whose size is nearest."""
    return min(_shapes(vocab_size), key=lambda shape: max(shape[0] / parameters, parameters / shape[0]))[1]


@cache
def _shapes(vocab_size: int) -> list[tuple[int, ModelConfig]]:
    return [(count_parameters(model).total, model) for model in _every_shape(vocab_size)]


def _every_shape(vocab_size: int) -> Iterator[ModelConfig]:
    """Shapes of about one layer per 64 to 128 of width, with heads of 64 or 128, and LLaMA's feed-forward layers."""
    for width in (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 8192):
        head = 64 if width <= 2048 else 128
        heads = width // head
        for layers in {max(2, round(width / ratio)) for ratio in (128, 96, 64)}:
            yield ModelConfig(
                vocab_size=vocab_size,
                layers=layers,
                hidden_size=width,
                intermediate_size=round(width * 8 / 3 / 64) * 64,
                heads=heads,
                kv_heads=heads if heads % 4 else heads // 4,
                tie_embeddings=width <= 1024,
            )


def _fields(model: ModelConfig) -> dict[str, Any]:
    names = ("vocab_size", "layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "tie_embeddings")
    return {name: getattr(model, name) for name in names}
