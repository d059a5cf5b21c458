"""Exported tokenizers give the ids of training, and what a tokenizer loses is measured: inputs from public reports."""

import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers as P

from hlat.data.tokenizers.load import describe_tokenizer, measure_loss
from hlat.runtime.errors import DataError
from tests.support.data.tokenizer_kinds import EOS, TEXTS, byte_bpe, load_made
from tests.support.data.tokenizer_reports import EXPORTED, LOSSY, Report

pytest.importorskip("sentencepiece")
SPELLED = (  # report, tokenizer, tokenizer_config.json, are the bytes of its tokens those of any text?
    ("huggingface/tokenizers#2382", {"pre_tokenizer": [P.UnicodeScripts(), P.ByteLevel(False)]}, {}, False),
    ("mlfoundations/open_clip#453", {"added": "!"}, {"pad_token": "!"}, False),
    ("mlfoundations/open_clip#453", {}, {"pad_token": "."}, False),  # special in the configuration only
    ("OpenNMT/OpenNMT-py#2326", {"added": "the"}, {}, False),
    ("OpenNMT/OpenNMT-py#2326", {}, {"eos_token": "the"}, False),
    ("openai-community/gpt2", {"added": "<mask>"}, {"eos_token": EOS}, True),  # entries that no text becomes
    ("Tekken", {"special": (EOS, "<s>", "[INST]")}, {}, True),  # whole words are entries, and these are no words
    ("Tekken", {"special": (EOS, "<s>", "INST")}, {}, False),
)
_DAILY = 8  # every so many reports are tried in the default suite


def _cases(reports: tuple[Report, ...]) -> list[Any]:
    return [
        pytest.param(report, id=report.issue, marks=[] if number % _DAILY == 4 else pytest.mark.slow)
        for number, report in enumerate(reports)
    ]


@pytest.mark.parametrize("report", _cases(EXPORTED))
def test_transformers_gives_an_exported_tokenizer_the_ids_of_training(report: Report, tmp_path: Path) -> None:
    """Witness: AutoTokenizer of the saved folder; and the sentencepiece library for its models."""
    transformers = pytest.importorskip("transformers")
    made = report.make()
    if report.refused:
        with pytest.raises(DataError, match=report.refused):
            load_made(tmp_path / "given", made, report.config)
        return
    ours = load_made(tmp_path / "given", made, report.config)
    ours.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert len(theirs) <= ours.vocab_size
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids == ids, text
        assert theirs(text).input_ids == ours.encode_prompt(text), text
        assert max([0, *ids, *ours.encode_prompt(text)]) < ours.vocab_size
    if isinstance(made, bytes):
        _assert_like_sentencepiece(made, ours)


def _assert_like_sentencepiece(model: bytes, ours: Any) -> None:
    import sentencepiece  # noqa: PLC0415 - an extra

    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    decomposed = [unicodedata.normalize("NFD", text) for text in ("Tiếng Việt rất đẹp", "각 한국어", "がぎ パピ")]
    names = [library.id_to_piece(index) for index in range(len(library))]
    for text in [text for text in (*TEXTS, *decomposed) if not any(f"{name}" in text for name in names[:3])]:
        if "<0x" not in text:  # names of pieces in a text are cut, which may differ in unknown characters
            assert ours.encode(text) == library.encode(text), text


@pytest.mark.parametrize("report", _cases(LOSSY))
def test_what_a_tokenizer_loses_is_measured_and_its_ids_stand_for_the_bytes_of_the_text(
    report: Report, tmp_path: Path
) -> None:
    """Witnesses: counts of characters before and after a round trip; two loads, which give the same ids."""
    made = report.make()
    ours, again = (load_made(tmp_path / name, made, report.config) for name in ("one", "two"))
    loss, lost, total = measure_loss(ours, TEXTS), 0, 0
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == again.encode(text) == ours.encode_batch([text])[0], "ids are random"
        if ids:
            assert ours.token_bytes[ids].sum() == len(text.encode()), text
        missing = Counter(text) - Counter(ours.decode(ids))
        lost += sum(len(char.encode()) * count for char, count in missing.items())
        total += len(text.encode())
    assert loss.lost >= lost / total - 1e-9, "characters in another order may be lost on top of those that are missing"
    assert (loss.lost == 0) is (lost == 0)
    assert not (report.keeps and lost), "the report is of a tokenizer that keeps the text"
    assert ((describe_tokenizer(ours, TEXTS) or ("",))[0].find("is lost") >= 0) is (lost > 0)
    if ours.keeps_text:
        assert not lost


@pytest.mark.parametrize(("issue", "parts", "config", "keeps"), SPELLED)
def test_tokens_that_spell_any_text_do_so(
    issue: str, parts: dict[str, Any], config: dict[str, Any], keeps: bool, tmp_path: Path
) -> None:
    """Bits per byte divide by these bytes: a special token has none, so it may not be what a text becomes."""
    del issue
    steps = {"pre_tokenizer": P.Sequence(parts["pre_tokenizer"])} if "pre_tokenizer" in parts else {}
    made = byte_bpe(parts.get("special", (EOS,)), **steps)
    made.model.ignore_merges = "special" in parts
    made.add_special_tokens([parts["added"]] if "added" in parts else [])
    ours = load_made(tmp_path, made, config)
    assert ours.keeps_text is keeps
    texts = [*TEXTS, "    indented\n    more", "the dog! The fox! Over.", "INST", EOS]
    texts = [text for text in texts if ours.encode(text)]
    sizes, encoded = [len(text.encode()) for text in texts], [ours.encode(text) for text in texts]
    assert ([int(np.asarray(ours.token_bytes)[list(ids)].sum()) for ids in encoded] == sizes) is keeps
    assert [int(ours.token_bytes[ids].sum()) for ids in encoded] == sizes
