"""A small model with a byte-level tokenizer that adds a begin token, as a Hugging Face folder."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from hlat.config.sections.model import ModelConfig
from hlat.model import build
from hlat.model.hf.folder import write_hf
from tests.support.model.canonical import to_canonical

WORDS = "Question: Answer: yes no True False the cat sees a river and builds 12 engines def return if for in 3 + 4 = 7"
MODEL: dict[str, Any] = {
    "vocab_size": 300,
    "layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "heads": 4,
    "kv_heads": 2,
    # far-apart logits, so that rounding does not change which token is the most likely
    "init_std": 0.3,
    "max_sequence_length": 160,
}


def write_text_model(folder: Path, *, begin: bool = True, **more: Any) -> Path:
    """Write the model to ``folder/hf``; return that folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 50, trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    source = folder / "tokenizer"
    source.mkdir(parents=True)
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>", '
        '"clean_up_tokenization_spaces": false}'
    )
    config = ModelConfig.model_validate({**MODEL, **more})
    weights = to_canonical(config, dict(build(config, device="cpu", seed=4).named_parameters()))
    return write_hf(folder / "hf", config, weights, tokenizer_dir=source, eos_id=0, bos_id=1)
