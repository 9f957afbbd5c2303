"""Compares the tensors of a checkpoint with the weights of its model, before anything is converted."""

from __future__ import annotations

from kvq.config import ModelConfig
from kvq.errors import CheckpointError
from kvq.loader.checkpoint import Checkpoint
from kvq.model.parameters import Parameter

#: Endings of tensors that hold no weights: buffers that some writers save.
_BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "masked_bias")
_SHOWN = 3


def check_tensors(checkpoint: Checkpoint, parameters: list[Parameter]) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of the model.

    An ``lm_head`` beside tied embeddings is ignored, as the model ignores it.

    Raises
    ------
    CheckpointError
        Naming the first tensors that are missing, unused or of a wrong shape, the file, and the likely cause.
    """
    config = checkpoint.config
    present = set(checkpoint.tensor_names())
    wanted = {source: shape for p in parameters for source, shape in p.source_shapes()}
    missing = [name for name in wanted if name not in present]
    unused = [
        name for name in checkpoint.tensor_names() if name not in wanted and not name.endswith(_BUFFERS)
    ]
    if config.tie_word_embeddings:
        unused = [name for name in unused if name != "lm_head.weight"]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: {_list(missing)} missing{_list_unused(unused)}: "
            f"{_cause(missing, unused, config.num_hidden_layers)}"
        )
    if unused:
        raise CheckpointError(
            f"{checkpoint.file_of(unused[0])}: {_list(unused)} not used by the model: "
            f"{_cause(missing, unused, config.num_hidden_layers)}"
        )
    for name, shape in wanted.items():
        found = checkpoint.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{checkpoint.file_of(name)}: tensor {name} has shape {list(found)}, "
                f"the configuration makes it {list(shape)} ({_shape_cause(name, config)})"
            )


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {shown}{more} {'is' if len(names) == 1 else 'are'}"


def _list_unused(unused: list[str]) -> str:
    return f" (and {_list(unused)} not used)" if unused else ""


def _layer(name: str) -> int:
    """The layer of a tensor; -1 for those of none."""
    number = name.partition(".layers.")[2].partition(".")[0]
    return int(number) if number.isdigit() else -1


def _cause(missing: list[str], unused: list[str], num_layers: int) -> str:
    if missing == ["lm_head.weight"]:
        return "the embeddings are not tied in the configuration: set tie_word_embeddings if they should be"
    if "model.embed_tokens.weight" in missing and len(missing) <= 2:
        return "the file with the embeddings is absent"
    if unused == ["lm_head.weight"]:
        return "tie_word_embeddings contradicts the file"
    if any(name.endswith((".qweight", ".qzeros", ".SCB", ".absmax")) for name in unused):
        return "the checkpoint is already quantized, use the original"
    if missing and any(
        name.removeprefix("model.") in unused or f"model.{name}" in unused for name in missing
    ):
        return "the names have another prefix: the file was saved from another class of model"
    if any(name.endswith(".bias") for name in (missing or unused)):
        return "attention_bias or mlp_bias of the configuration does not fit"
    if any(".experts." in name for name in (missing or unused)):
        return "the number of experts, or which layers have them, does not fit, or a shard is absent"
    if any(0 <= _layer(name) < num_layers for name in unused):
        return "model_type names another family than the tensors are of"
    if any(".layers." in name for name in (missing or unused)):
        return "num_hidden_layers does not fit, or a shard is absent"
    return "configuration and weights are of different models"


def _shape_cause(name: str, config: ModelConfig) -> str:
    if ".experts." in name:
        return f"moe_intermediate_size {config.moe_intermediate_size}, hidden_size {config.hidden_size}"
    if name.endswith("gate.weight"):
        return f"num_experts {config.num_experts}, hidden_size {config.hidden_size}"
    if "_proj" in name and "self_attn" in name:
        return (
            f"num_attention_heads {config.num_attention_heads}, num_key_value_heads "
            f"{config.num_key_value_heads}, head_dim {config.head_dim}"
        )
    if "mlp" in name:
        return f"intermediate_size {config.intermediate_size}, hidden_size {config.hidden_size}"
    return f"vocab_size {config.vocab_size}, hidden_size {config.hidden_size}"
