"""mlc-chat-config.json and tokenizer files: what is written, where answers stop, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints import CHAT_TEMPLATE, edit_json, write_json, write_tiny_llama
from kvq.config import ChatConfig, ModelConfig
from kvq.errors import CheckpointError, ConfigError, KvqError
from kvq.gen_config import gen_config
from kvq.loader import open_checkpoint
from kvq.tokenizer import Tokenizer


def refuse(path: Path, output: Path, quantization: str = "q4f16kv", **options: object) -> str:
    """Generate a configuration that must be refused; the message, which must be one line."""
    with pytest.raises(KvqError) as error:
        gen_config(path, quantization, output, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("fmt", ["safetensors", "gguf"])
def test_what_is_written_can_be_read(tmp_path: Path, fmt: str) -> None:
    path = write_tiny_llama(tmp_path / "in", fmt=fmt)
    written = gen_config(path, "q4f16kv", tmp_path / "out", max_batch_size=4)
    read = ChatConfig.load(tmp_path / "out")
    assert read == written == ChatConfig.load(tmp_path / "out" / "mlc-chat-config.json")
    with open_checkpoint(path) as checkpoint:
        assert read.model == checkpoint.config
    assert (read.model_type, read.quantization, read.kv_quantization) == ("llama", "q4f16_1", "int4")
    assert (read.context_window_size, read.prefill_chunk_size, read.max_batch_size) == (1024, 1024, 4)
    assert (read.bos_token_id, read.eos_token_id, read.stop_token_ids) == (1, 2, [2])
    assert (read.vocab_size, read.conv_template, read.chat_template) == (320, "checkpoint", CHAT_TEMPLATE)
    assert read.tokenizer_files == ["tokenizer.json", "tokenizer_config.json"]
    assert all((tmp_path / "out" / name).exists() for name in read.tokenizer_files)
    # The vocabulary of the directory ends before the embeddings do.
    assert read.active_vocab_size == (320 if fmt == "gguf" else 259)
    tokenizer = Tokenizer.from_dir(tmp_path / "out")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the é 日"}])
    assert text == "<|im_start|>user\nthe é 日<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert ids[0] == 1 and ids.count(2) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_file_has_the_keys_of_mlc(tmp_path: Path) -> None:
    gen_config(write_tiny_llama(tmp_path / "in"), "q0f16", tmp_path / "out")
    keys = set(json.loads((tmp_path / "out" / "mlc-chat-config.json").read_text()))
    assert keys >= {
        *("version", "model_type", "quantization", "model_config", "vocab_size", "context_window_size"),
        *("sliding_window_size", "prefill_chunk_size", "attention_sink_size", "tensor_parallel_shards"),
        *("pipeline_parallel_stages", "temperature", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "top_p", "tokenizer_files", "tokenizer_info", "conv_template"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "max_batch_size"),
    }


def test_sizes(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "in")
    edit_json(path / "config.json", max_position_embeddings=8192)
    chat = gen_config(path, "q0f16", tmp_path / "out")
    assert (chat.context_window_size, chat.prefill_chunk_size, chat.max_batch_size) == (8192, 2048, 128)
    chat = gen_config(path, "q0f16", tmp_path / "out", context_window_size=500, prefill_chunk_size=64)
    assert (chat.context_window_size, chat.prefill_chunk_size) == (500, 64)
    assert "--context-window-size 8193 is out of range" in refuse(
        path, tmp_path / "out", context_window_size=8193
    )
    assert "out of range" in refuse(path, tmp_path / "out", context_window_size=0)
    assert "prefill_chunk_size" in refuse(path, tmp_path / "out", prefill_chunk_size=-1)
    assert "max_batch_size" in refuse(path, tmp_path / "out", max_batch_size=-1)
    edit_json(path / "config.json", rope_scaling={"type": "linear", "factor": 2.0})
    assert gen_config(path, "q0f16", tmp_path / "out", context_window_size=16384).context_window_size == 16384


@pytest.mark.parametrize(
    ("quantization", "kv", "expected"),
    [
        ("q3f16kv", None, ("q4f16_1", "int3")),
        ("q0f32", None, ("q0f32", "none")),
        ("q0f32", "int4", ("q0f32", "int4")),
        ("q4f16kv", "k=int4:v=int2", ("q4f16_1", "k=int4:v=int2")),
    ],
)
def test_schemes(tmp_path: Path, quantization: str, kv: str | None, expected: tuple[str, str]) -> None:
    chat = gen_config(write_tiny_llama(tmp_path / "in"), quantization, tmp_path / "out", kv_quantization=kv)
    assert (chat.quantization, chat.kv_quantization) == expected


def test_what_cannot_work_is_refused_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "head_dim 100 is not supported" in refuse(write_tiny_llama(tmp_path / "a", head_dim=100), out)
    path = write_tiny_llama(tmp_path / "b", hidden_size=200)
    assert "use q0f16" in refuse(path, out)
    assert "unknown --kv-quantization 'int5'" in refuse(path, out, "q0f16", kv_quantization="int5")
    assert "unknown --conv-template 'alpaca'" in refuse(path, out, "q0f16", conv_template="alpaca")
    assert not out.exists()


# ---- where an answer stops ---------------------------------------------------------------------------
def stops(path: Path, output: Path, **options: str) -> tuple[list[int], list[str]]:
    chat = gen_config(path, "q0f16", output, **options)  # type: ignore[arg-type]
    return chat.stop_token_ids, chat.stop_strings


def test_stop_ids_of_all_sources_together(tmp_path: Path) -> None:
    path, out = write_tiny_llama(tmp_path / "in"), tmp_path / "out"
    edit_json(path / "config.json", eos_token_id=0)
    assert stops(path, out) == ([0, 2], [])  # config.json, then tokenizer and template
    write_json(path / "generation_config.json", {"eos_token_id": [7, 8]})
    assert stops(path, out) == ([7, 8, 0, 2], [])
    assert ChatConfig.load(out).eos_token_id == [7, 8, 0, 2]
    # The template's own marker counts where nothing else names it.
    edit_json(path / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    (path / "generation_config.json").unlink()
    edit_json(path / "config.json", eos_token_id=None)
    assert stops(path, out) == ([0, 2], [])


def test_a_marker_that_is_no_token_stops_as_text(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "in")
    assert stops(path, tmp_path / "out", conv_template="llama-3") == ([2], ["<|eot_id|>"])


def test_sampling_settings_of_the_checkpoint(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "in")
    write_json(path / "generation_config.json", {"temperature": 0.2, "top_p": 0.9})
    chat = gen_config(path, "q0f16", tmp_path / "out")
    assert (chat.temperature, chat.top_p, chat.repetition_penalty) == (0.2, 0.9, 1.0)


# ---- chat templates ----------------------------------------------------------------------------------
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
RENDERED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "llama-2": "{bos}[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello {eos}{bos}[INST] Bye [/INST]",
    "llama-3": "{bos}<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "plain": "{bos}Be brief.HiHelloBye",
}


@pytest.mark.parametrize("name", RENDERED)
def test_built_in_templates(tmp_path: Path, name: str) -> None:
    path = write_tiny_llama(tmp_path / "in")
    edit_json(path / "tokenizer_config.json", bos_token="<|endoftext|>")
    edit_json(path / "config.json", bos_token_id=None)
    assert gen_config(path, "q0f16", tmp_path / "out", conv_template=name).conv_template == name
    text = Tokenizer.from_dir(tmp_path / "out").apply_chat_template(MESSAGES)
    assert text == RENDERED[name].format(bos="<|endoftext|>", eos="<|im_end|>")


def test_llama_2_without_a_system_message(tmp_path: Path) -> None:
    gen_config(write_tiny_llama(tmp_path / "in"), "q0f16", tmp_path / "out", conv_template="llama-2")
    text = Tokenizer.from_dir(tmp_path / "out").apply_chat_template(MESSAGES[1:])
    assert text == "<|im_start|>[INST] Hi [/INST] Hello <|im_end|><|im_start|>[INST] Bye [/INST]"


def test_where_templates_are_found(tmp_path: Path) -> None:
    path, out = write_tiny_llama(tmp_path / "in"), tmp_path / "out"
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(path / "tokenizer_config.json", chat_template=several)
    assert gen_config(path, "q0f16", out).chat_template == "D"
    (path / "chat_template.jinja").write_text("J")
    assert gen_config(path, "q0f16", out).chat_template == "J"
    (path / "chat_template.jinja").unlink()
    edit_json(path / "tokenizer_config.json", chat_template=None)
    assert gen_config(path, "q0f16", out).conv_template == "plain"
    assert "no chat template" in refuse(path, out, conv_template="checkpoint")


def test_broken_template(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "in")
    edit_json(path / "tokenizer_config.json", chat_template="{% for m in %}")
    assert "chat template is not valid: line 1" in refuse(path, tmp_path / "out")


# ---- tokenizer files ---------------------------------------------------------------------------------
def test_tokenizers_that_do_not_fit(tmp_path: Path) -> None:
    path, out = write_tiny_llama(tmp_path / "in", vocab_size=200), tmp_path / "out"
    write_tiny_llama(tmp_path / "other")
    tokenizer = (tmp_path / "other" / "tokenizer.json").read_bytes()
    (path / "tokenizer.json").write_bytes(tokenizer)
    assert "ids up to 258, the model only 200" in refuse(path, out)
    (path / "tokenizer.json").write_bytes(tokenizer[:1000])
    assert "tokenizer.json: cannot be read as a tokenizer" in refuse(path, out)
    (path / "tokenizer.json").unlink()
    assert "no tokenizer.json, tokenizer.model or *.tiktoken" in refuse(path, out)


def test_unwritable_output_leaves_it_as_it_was(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "in")
    (tmp_path / "out").write_text("precious")
    assert "out: cannot be written: " in refuse(path, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"
    with pytest.raises(CheckpointError, match="no such file"):
        gen_config(tmp_path / "nothing", "q0f16", tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ---- the schema --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vocab_size": None}, "vocab_size: is missing"),
        ({"contxt_window_size": 5}, "contxt_window_size: is not a known key"),
        ({"prefill_chunk_size": "large"}, "prefill_chunk_size: "),
        ({"max_batch_size": 0}, "max_batch_size: "),
        ({"top_p": 1.5}, "top_p: "),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids.0: "),
    ],
)
def test_invalid_files_are_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    gen_config(write_tiny_llama(tmp_path / "in"), "q0f16", tmp_path)
    file = tmp_path / "mlc-chat-config.json"
    edit_json(file, **changes)
    with pytest.raises(ConfigError) as error:
        ChatConfig.load(tmp_path)
    assert expected in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_an_invalid_part_is_named_by_its_path(tmp_path: Path) -> None:
    gen_config(write_tiny_llama(tmp_path / "in"), "q0f16", tmp_path)
    file = tmp_path / "mlc-chat-config.json"
    model = json.loads(file.read_text())["model_config"]
    edit_json(file, model_config={**model, "head_dim": "wide"})
    with pytest.raises(ConfigError, match=r"model_config.head_dim: .*'wide'"):
        ChatConfig.load(file)
    edit_json(file, model_config={**model, "num_key_value_heads": 5})
    with pytest.raises(ConfigError, match="num_attention_heads 6 is not a multiple"):
        ChatConfig.load(file)


def test_files_that_are_not_there_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mlc-chat-config.json: no such file"):
        ChatConfig.load(tmp_path)
    (tmp_path / "mlc-chat-config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ChatConfig.load(tmp_path)
    (tmp_path / "mlc-chat-config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        ChatConfig.load(tmp_path)


def test_an_invalid_value_is_not_written(tmp_path: Path) -> None:
    chat = gen_config(write_tiny_llama(tmp_path / "in"), "q0f16", tmp_path)
    before = (tmp_path / "mlc-chat-config.json").read_bytes()
    chat.top_p = 7.0
    with pytest.raises(ConfigError, match="top_p: "):
        chat.save(tmp_path)
    assert (tmp_path / "mlc-chat-config.json").read_bytes() == before


def test_model_config_is_strict() -> None:
    with pytest.raises(ValueError, match="rope_type 'spiral'"):
        ModelConfig(
            model_type="llama",
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=8,
            rms_norm_eps=1e-5,
            rope_scaling={"rope_type": "spiral"},
        )
