"""Tokenizers round-trip, agree with the libraries that load them elsewhere, and account for every byte."""

import base64
import json
import random
import re
import shutil
import threading
from functools import cache
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from hlat.data.tokenizers import sentencepiece as sentencepiece_tokenizer
from hlat.data.tokenizers import training
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.char_tokenizer import read_json_tokenizer
from hlat.data.tokenizers.cutting import _PUBLISHED_PATTERNS, OWN_PATTERN, cut_text, cuts_preserve_tokens
from hlat.data.tokenizers.load import load_saved, load_tokenizer
from hlat.data.tokenizers.training import sample_texts, train_bpe, train_char
from hlat.runtime.errors import DataError
from hlat.runtime.helper_process import Channel
from tests.support.data.corpora import documents, prose

LLAMA2 = Path(__file__).parents[4] / "shared" / "data" / "tokenizers" / "llama2.model"
needs_llama2 = pytest.mark.skipif(not LLAMA2.exists(), reason="needs the Llama-2 SentencePiece model in ../shared")

BPE = train_bpe(documents(50, 1000), 600)
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
# All that the regular expressions distinguish: letters, marks, digits, quotes, punctuation, kinds of white space.
_tricky = st.text(st.sampled_from("abZst'’é日\u0301 \u00a0\n\r\t019½.!<|_"), max_size=80)


@given(text=_text | _tricky)
@settings(deadline=None)
def test_byte_level_bpe_round_trips_and_accounts_for_every_byte(text: str) -> None:
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert BPE.token_bytes[ids].sum() == len(text.encode())


@given(text=_text.filter(bool), data=st.data())
@settings(deadline=None)
def test_the_character_tokenizer_round_trips_and_accounts_for_every_byte(text: str, data: st.DataObject) -> None:
    tokenizer = train_char(text, data.draw(st.sampled_from(["auto", None, "<|end|>"])))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert ids == [sorted(set(text)).index(char) for char in text]
    library = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    assert library.encode(text).ids == ids and library.decode(ids) == text


def test_names_of_special_tokens_in_a_text_are_text() -> None:
    text = "one<|endoftext|>two"
    ids = BPE.encode(text)
    assert BPE.eos_id not in ids
    assert BPE.decode(ids) == text
    assert BPE.token_bytes[BPE.eos_id] == 0
    assert BPE.decode([*BPE.encode("a"), BPE.eos_id or 0]) == "a"


def test_training_is_deterministic_and_gives_the_requested_size() -> None:
    texts = documents(50, 1000)
    assert BPE.vocab_size == 600 and BPE.eos_token == "<|endoftext|>" and BPE.eos_id == 0
    assert all(train_bpe(texts, 600).files == BPE.files for _ in range(3))
    assert train_bpe(["abab"], 1000).vocab_size < 300
    without = train_bpe(texts, 256, None)
    assert without.vocab_size == 256 and without.eos_id is None
    with pytest.raises(DataError, match="at least 257"):
        train_bpe(texts, 256)


def test_a_tokenizer_that_is_trained_in_a_process_is_the_same_and_tells_its_merges() -> None:
    reports: list[tuple[str, int, int]] = []
    tokenizer = train_bpe(documents(50, 1000), 600, progress=lambda *report: reports.append(report))
    assert tokenizer.files == BPE.files
    assert {stage for stage, _, _ in reports} | {"count words"} == {"count words", "train tokenizer"}
    assert all(done < total for stage, done, total in reports if stage == "count words")
    assert reports[-1][1:] == (600 - 256 - 1, 600 - 256 - 1)  # bytes and the end-of-sequence token are no merges


def test_an_interruption_ends_the_process_that_trains() -> None:
    def interrupt(*report: object) -> None:
        raise KeyboardInterrupt

    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyboardInterrupt):
        train_bpe(documents(50, 1000), 600, progress=interrupt)
    assert not set(psutil.Process().children(recursive=True)) - before


def test_a_killed_process_is_an_error_that_names_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the end of the texts, which does not come before it is killed."""
    before = set(psutil.Process().children())  # other tests of this process may have left a server
    send, killed = training._send, threading.Event()

    def send_without_end(channel: Channel, *given: Any) -> None:
        held: Any = SimpleNamespace(send=lambda texts: channel.send(texts) if texts else killed.wait())
        send(held, *given)

    monkeypatch.setattr(training, "_send", send_without_end)

    def kill(*report: object) -> None:
        for child in set(psutil.Process().children()) - before:
            child.kill()
        killed.set()

    with pytest.raises(DataError, match=r"killed by signal 9, perhaps because memory ran out\..*train_bytes"):
        train_bpe(documents(50, 1000), 600, progress=kill)


def test_each_digit_is_a_token() -> None:
    tokenizer = train_bpe(["12345 12345 12345"] * 100, 300)
    assert len(tokenizer.encode("12345")) == 5


def test_a_sample_is_bounded_uniform_and_in_order() -> None:
    texts = documents(400, 500)
    everything = sample_texts(texts, 10**9)
    assert everything == texts
    some = sample_texts(texts, 40_000)
    assert 35_000 < sum(len(t.encode()) for t in some) <= 40_000
    positions = [texts.index(t) for t in some]
    assert positions == sorted(positions)
    # About 80 of 400 at uniformly random positions: a quarter of the corpus has none with probability 0.75**80 = 1e-10.
    assert all(any(100 * q <= p < 100 * (q + 1) for p in positions) for q in range(4))
    long = sample_texts([prose(1, 500_000)], 100_000)
    assert len(long) > 1 and sum(len(t.encode()) for t in long) <= 100_000


# --- cutting -----------------------------------------------------------------------------------------------------


def _bpe(pre_tokenizer: object) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    # Texts in which merges across white space would be frequent if they were possible.
    tokenizer.train_from_iterator([prose(3, 20_000), "a b\nc d " * 500, "don't stop'll 12 ab\n\n cd " * 200], trainer)
    return Tokenizer(tokenizer.to_str().encode(), None, None)


def _split(pattern: str) -> object:
    isolated = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([isolated, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


CUTTABLE = [_bpe(_split(p)) for p in (OWN_PATTERN, *_PUBLISHED_PATTERNS)] + [_bpe(pre_tokenizers.ByteLevel(False))]


@given(text=_tricky, min_chars=st.integers(1, 10))
@settings(deadline=None, max_examples=400)
def test_cuts_do_not_change_tokens(text: str, min_chars: int) -> None:
    chunks = list(cut_text(text, min_chars))
    assert "".join(chunks) == text
    for tokenizer in CUTTABLE:
        assert [i for ids in tokenizer.encode_batch(chunks) for i in ids] == tokenizer.encode(text)


def test_only_texts_of_proven_tokenizers_are_cut() -> None:
    assert all(cuts_preserve_tokens(json.loads(t.files["tokenizer.json"])) for t in CUTTABLE)
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"added_tokens": [{"content": "a b", "special": False}]},
    ):
        assert not cuts_preserve_tokens({**json.loads(CUTTABLE[0].files["tokenizer.json"]), **change})


def test_documents_encoded_in_chunks_have_the_same_tokens() -> None:
    texts = [prose(5, 700_000), "short", "", "日" * 300_000]
    assert [ids.tolist() for ids in BPE.encode_documents(texts)] == BPE.encode_batch(texts)


# --- loading tokenizers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bpe", "char", "char with an end"])
def test_transformers_loads_a_saved_tokenizer_and_agrees(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    text = prose(7, 3000)
    tokenizer = BPE if kind == "bpe" else train_char(text, "<|end|>" if "end" in kind else None)
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.eos_id
    assert len(theirs) == tokenizer.vocab_size
    ours = load_tokenizer(tmp_path)
    assert (ours.eos_id, ours.vocab_size, ours.sha256) == (tokenizer.eos_id, tokenizer.vocab_size, tokenizer.sha256)
    assert type(ours) is type(tokenizer)


def test_the_end_of_sequence_token_is_found_or_requested_by_name(tmp_path: Path) -> None:
    BPE.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    assert load_tokenizer(file, None).eos_id is None
    assert load_tokenizer(file, "a").eos_id == BPE.encode("a")[0]
    with pytest.raises(DataError, match=r"has no token '</s>'.*<\|endoftext\|>"):
        load_tokenizer(file, "</s>")
    alone = tmp_path / "alone.json"
    alone.write_bytes(train_bpe(documents(5, 500), 300, None).files["tokenizer.json"])
    with pytest.raises(DataError, match="does not say which token ends a document"):
        load_tokenizer(alone)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": 7}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_file_that_is_not_a_tokenizer_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DataError, match=str(file)):
        load_tokenizer(file)


def test_tiktokens_list_of_tokens_is_named_with_the_cure(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_text("".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)))
    with pytest.raises(DataError, match=r"tiktoken.*Give the tokenizer\.json") as error:
        load_tokenizer(file)
    assert "Restore" not in str(error.value) and "damaged" not in str(error.value)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(DataError, match=str(path)):
            load_tokenizer(path)


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(DataError, match=r"'é' \(U\+00E9\)"):
        train_char("abc").encode("abé")


@needs_llama2
def test_sentencesentencepiece_tokenizers_have_the_tokens_of_the_library(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    library = sentencepiece.SentencePieceProcessor(model_file=str(LLAMA2))
    tokenizer = load_tokenizer(LLAMA2)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (32000, 1, 2)
    for text in [*documents(5, 400), "a</s>b <s>", "  two  spaces ", "日本\U0001f600\n\n", ""]:
        ids = tokenizer.encode(text)
        assert ids == library.encode(text)
        assert tokenizer.decode(ids) == text
        prefix = 1 if text else 0  # SentencePiece puts a space in front
        assert tokenizer.token_bytes[list(ids)].sum() == len(text.encode()) + prefix
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    tokenizer.save(tmp_path)
    again = load_saved(tmp_path)
    assert (again.eos_id, again.sha256) == (tokenizer.eos_id, tokenizer.sha256)
    load_tokenizer(LLAMA2, None).save(tmp_path)
    assert load_saved(tmp_path).eos_id is None


@needs_llama2
def test_transformers_agrees_with_a_saved_sentencesentencepiece_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(LLAMA2)
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*documents(5, 400), "  two  spaces ", "日本\U0001f600\n\n", Path(json.__file__).read_text()]:
        ids = tokenizer.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == tokenizer.eos_id
    assert len(theirs) == tokenizer.vocab_size
    assert load_tokenizer(tmp_path).encode("a   b") == tokenizer.encode("a   b")


@needs_llama2
@given(text=st.text(st.sampled_from("abZ \n.é日1"), max_size=120))
@settings(deadline=None, max_examples=100)
def test_sentencepiece_cuts_do_not_change_tokens(text: str) -> None:
    tokenizer = _llama2()
    assert tokenizer._can_cut
    chunks = list(tokenizer.chunks(text, 3))
    assert [i for ids in tokenizer.encode_batch(chunks) for i in ids] == tokenizer.encode(text)


@pytest.mark.parametrize(("model", "is_cut"), [("bpe", True), ("unigram", False)])
def test_texts_of_unigram_models_are_not_cut(tmp_path: Path, model: str, is_cut: bool) -> None:
    """Unigram models sum scores over the full text, so its length can decide between two similar segmentations."""
    sentencepiece = pytest.importorskip("sentencepiece")
    text = documents(1, 40_000)[0]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.split(". ")), model_prefix=str(tmp_path / "tokenizer"), model_type=model,
        vocab_size=320, byte_fallback=True, hard_vocab_limit=False, minloglevel=2, normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    chunks = list(tokenizer.chunks(text, 1 << 12))
    assert (len(chunks) > 1) is is_cut
    assert [i for ids in tokenizer.encode_documents(chunks) for i in ids.tolist()] == tokenizer.encode(text)


@needs_llama2
@given(text=st.text(st.sampled_from("ab  \n--==..__é日1"), max_size=80) | _text)
@settings(deadline=None, max_examples=300)
def test_a_converted_sentencesentencepiece_tokenizer_gives_the_same_tokens(text: str) -> None:
    assert _converted().encode(text, add_special_tokens=False).ids == _llama2().encode(text)


@cache
def _llama2() -> sentencepiece_tokenizer.SentencePieceTokenizer:
    tokenizer = load_tokenizer(LLAMA2)
    assert isinstance(tokenizer, sentencepiece_tokenizer.SentencePieceTokenizer)
    return tokenizer


@cache
def _converted() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(_llama2().files["tokenizer.json"].decode())


@pytest.mark.parametrize("begins", [False, True])
def test_a_prompt_is_encoded_as_by_transformers(tmp_path: Path, begins: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", "</s>"])
    if begins:
        library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    library.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = (
        load_tokenizer(tmp_path),
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")),
    )
    for text in ("a b", "a </s> b", ""):
        assert ours.encode_prompt(text) == theirs(text).input_ids
    assert ours.encode("a </s> b") != ours.encode_prompt("a </s> b")[begins:], (
        "text in a corpus cannot become an end token"
    )


def test_a_text_that_cannot_be_encoded_is_a_data_error() -> None:
    for tokenizer in (BPE, train_char("abc"), *([_llama2()] if LLAMA2.exists() else [])):
        for encode in (tokenizer.encode, tokenizer.encode_prompt):
            with pytest.raises(DataError, match=r"'a\\udcff' is not valid UTF-8: character 1"):
                encode("a\udcff")
    with pytest.raises(DataError, match=r"'é' \(U\+00E9\)"):
        train_char("abc").encode_prompt("aé")


@needs_llama2
@pytest.mark.parametrize("begins", [None, True])
def test_a_sentencepiece_prompt_is_encoded_as_by_transformers(tmp_path: Path, begins: bool | None) -> None:
    transformers = pytest.importorskip("transformers")
    given, saved = tmp_path / "given", tmp_path / "saved"
    given.mkdir()
    shutil.copy(LLAMA2, given / "tokenizer.model")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": begins, **names}
    if begins is not None:
        (given / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(given)
    ours.save(saved)
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    for text in ("hello world", "a </s> b", "<s>hi", "", "  two  spaces", "日本\U0001f600\n\n"):
        ids = ours.encode_prompt(text)
        assert ids == theirs(text).input_ids == load_saved(saved).encode_prompt(text)
        if "s>" not in text:
            assert ids == [ours.bos_id] * bool(begins) + ours.encode(text)
    if begins is not None:  # transformers reads the original folder in the same way
        original = transformers.AutoTokenizer.from_pretrained(given)
        assert original("hello world").input_ids == ours.encode_prompt("hello world")


# --- damaged tokenizers ------------------------------------------------------------------------------------------


def _read(content: bytes, config: object = None) -> None:
    """Use a tokenizer in every way that a run does."""
    tokenizer = read_json_tokenizer(content, config, "auto", "here/tokenizer.json")  # type: ignore[arg-type]
    ids = tokenizer.encode_documents(["one, two\n", "ü日本"])
    tokenizer.decode(ids[0].tolist())
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size and tokenizer.sha256


def _with(change: dict[str, object]) -> bytes:
    description = json.loads(BPE.files["tokenizer.json"])
    return json.dumps({**description, "model": {**description["model"], **change}}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_with({"vocab": {}, "merges": []}).replace(b'"<|endoftext|>"', b'""'), "no tokens"),
        (b'{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}', "no tokens"),
        (_with({"vocab": {"a": 2**32 - 1}, "merges": []}), "id 4,294,967,295"),
        (_with({"vocab": {"a": 2**40}, "merges": []}), "not a tokenizer.json"),
        (_with({"continuing_subword_prefix": "x"}), "does not begin with 'x'"),
        (_with({"type": 5}), "not a tokenizer.json"),
        (b"[" * 100_000, "not a tokenizer.json"),
        (b"[]", "a JSON list, not an object"),
        (b"", "not a tokenizer.json"),
        (train_char("abc").files["tokenizer.json"].replace(b'"a"', b'"aa"').replace(b'"b"', b'"bb"')
         .replace(b'"c"', b'"cc"'), "empty vocabulary"),
    ],
)  # fmt: skip
def test_a_malformed_tokenizer_json_is_an_error_that_names_it(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"here/tokenizer.json: .*{re.escape(message)}"):
        _read(content)


@pytest.mark.parametrize("odd", [5, True, [], {}, {"content": 5}, {"content": []}])
def test_a_malformed_tokenizer_config_is_a_data_error(tmp_path: Path, odd: object) -> None:
    for key in ("eos_token", "bos_token"):
        with pytest.raises(DataError, match=f"tokenizer_config.json: {key} is "):
            _read(BPE.files["tokenizer.json"], {key: odd})
    BPE.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(odd))
    if not isinstance(odd, dict):
        with pytest.raises(DataError, match=r"tokenizer_config\.json: a JSON .*, not an object"):
            load_saved(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_saved(tmp_path)


def test_a_tokenizer_json_with_a_flipped_bit_is_a_data_error_or_works() -> None:
    rng, read = random.Random(0), 0
    for tokenizer in (BPE, train_char("one, two\nü日本", "<|end|>")):
        content = tokenizer.files["tokenizer.json"]
        for position in [*range(0, 2000, 9), *rng.sample(range(len(content)), 60)]:
            changed = bytearray(content)
            changed[position % len(content)] ^= 1 << rng.randrange(8)
            try:
                _read(bytes(changed))
                read += 1
            except DataError:
                pass
    assert read > 0


def test_a_sentencesentencepiece_tokenizer_with_a_flipped_bit_is_a_data_error_or_works() -> None:
    library = pytest.importorskip("sentencepiece")
    out, rng, read = BytesIO(), random.Random(0), 0
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(documents(20, 300)), model_writer=out, vocab_size=350, model_type="unigram",
        byte_fallback=True, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    content = out.getvalue()
    for position in [*range(200), *rng.sample(range(len(content)), 200)]:
        changed = bytearray(content)
        changed[position] ^= 1 << rng.randrange(8)
        try:
            tokenizer = sentencepiece_tokenizer.SentencePieceTokenizer(bytes(changed), where="here.model")
            tokenizer.encode_documents(["one, two\n", "ü日本"])
            assert len(tokenizer.token_bytes) == tokenizer.vocab_size and tokenizer.sha256
            read += 1
        except DataError as error:
            assert "here.model" in str(error)
    assert read > 0
