"""The LLaMA family: pre-norm blocks of attention and SwiGLU, with optional biases and norms of queries and keys.

    x -> attention_norm -> q, k, v -> (q_norm, k_norm) -> attention -> output -> +
      -> feed_forward_norm -> gate, up -> down -> +

Qwen2 has biases of q, k and v, Qwen3 norms of queries and keys.
"""

from functools import lru_cache

from hlat.config.sections import ModelConfig
from hlat.model.spec import Axis, Component, Fusion, GradientSum, Initial, ModelSpec, ParameterSpec, TensorSpec


def llama_spec(config: ModelConfig) -> ModelSpec:
    """Describe the parameters of a LLaMA-family model."""
    return _describe(config.tie_embeddings, config.coalesce, config.qkv_bias, config.qk_norm)


@lru_cache
def _describe(tie_embeddings: bool, coalesce: bool, qkv_bias: bool, qk_norm: bool) -> ModelSpec:
    tied = GradientSum.TIED if tie_embeddings else GradientSum.NONE
    rows = (Axis.VOCABULARY, Axis.WIDTH)
    embedding = TensorSpec("model.embed_tokens.weight", *rows, Component.EMBEDDING, gradient_sum=tied)
    head = TensorSpec("lm_head.weight", *rows, Component.HEAD)
    return ModelSpec(
        embedding=ParameterSpec("embedding.weight", (embedding,)),
        block=(
            _norm("attention_norm.weight", "input_layernorm.weight", step="attention_norm"),
            *_attention(coalesce, qkv_bias, qk_norm),
            _norm("feed_forward_norm.weight", "post_attention_layernorm.weight", step="feed_forward_norm"),
            *_feed_forward(coalesce),
        ),
        norm=_norm("norm.weight", "model.norm.weight"),
        head=None if tie_embeddings else ParameterSpec("head.weight", (head,)),
    )


def _norm(name: str, canonical: str, step: str = "") -> ParameterSpec:
    """A norm of the residual stream."""
    tensor = TensorSpec(canonical, Axis.WIDTH, None, Component.NORMS, Initial.ONES, GradientSum.SEQUENCE)
    return ParameterSpec(name, (tensor,), step=step)


def _attention(coalesce: bool, qkv_bias: bool, qk_norm: bool) -> list[ParameterSpec]:
    parameters = _projections("weight", coalesce)
    if qkv_bias:
        parameters += _projections("bias", coalesce)
    if qk_norm:
        parameters += [_head_norm("q_norm.weight"), _head_norm("k_norm.weight")]
    output = TensorSpec("self_attn.o_proj.weight", Axis.WIDTH, Axis.QUERIES, Component.ATTENTION, Initial.RESIDUAL)
    return [*parameters, ParameterSpec("attention.output.weight", (output,), step="output")]


def _projections(kind: str, coalesce: bool) -> list[ParameterSpec]:
    """Weights or biases of the projections to queries, keys and values: one parameter or three."""
    columns, initial = (Axis.WIDTH, Initial.NORMAL) if kind == "weight" else (None, Initial.ZEROS)
    axes = {"q": Axis.QUERIES, "k": Axis.KEYS, "v": Axis.KEYS}
    sums = {Axis.QUERIES: GradientSum.NONE, Axis.KEYS: GradientSum.KEY_COPIES}
    tensors = {
        name: TensorSpec(f"self_attn.{name}_proj.{kind}", rows, columns, Component.ATTENTION, initial, sums[rows])
        for name, rows in axes.items()
    }
    if coalesce:
        return [ParameterSpec(f"attention.qkv.{kind}", tuple(tensors.values()), Fusion.KEY_HEADS, "qkv")]
    return [
        ParameterSpec(f"attention.{name}.{kind}", (tensor,), Fusion.KEY_HEADS, "qkv")
        for name, tensor in tensors.items()
    ]


def _head_norm(name: str) -> ParameterSpec:
    """A norm of each query or key head."""
    tensor = TensorSpec(f"self_attn.{name}", Axis.HEAD, None, Component.NORMS, Initial.ONES, GradientSum.TENSOR)
    return ParameterSpec(f"attention.{name}", (tensor,), step="qk_norm")


def _feed_forward(coalesce: bool) -> list[ParameterSpec]:
    gate, up = (
        TensorSpec(f"mlp.{name}_proj.weight", Axis.INNER, Axis.WIDTH, Component.FEED_FORWARD) for name in ("gate", "up")
    )
    down = TensorSpec("mlp.down_proj.weight", Axis.WIDTH, Axis.INNER, Component.FEED_FORWARD, Initial.RESIDUAL)
    if coalesce:
        first = [ParameterSpec("feed_forward.gate_up.weight", (gate, up), Fusion.GATE_UP, "gate_up")]
    else:
        first = [
            ParameterSpec(f"feed_forward.{name}.weight", (tensor,), Fusion.GATE_UP, "gate_up")
            for name, tensor in (("gate", gate), ("up", up))
        ]
    return [*first, ParameterSpec("feed_forward.down.weight", (down,), step="down")]
