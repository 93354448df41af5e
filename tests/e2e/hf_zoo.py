"""Models of transformers with tiny configs and random weights, and rows of data as their tokenizers return them.

Half of the rows are padded: a microbatch has padding in some steps and none in others. Each factory makes a module
whose forward returns the loss; each source of data returns columns of that forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.data import DataSets, indexed

VOCABULARY, LENGTH, PAD = 64, 12, 0
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 32,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "pad_token_id": PAD,
    "decoder_start_token_id": PAD,
}
_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
_ENCODER_AND_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
_WHISPER: dict[str, Any] = {
    **_ENCODER_AND_DECODER,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 32,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_CLIP: dict[str, Any] = {
    "text_config": {**_SIZES, "num_hidden_layers": 3, "projection_dim": 16},
    "vision_config": {**_VIT, "num_hidden_layers": 3, "projection_dim": 16},
    "projection_dim": 16,
}
_MBART: dict[str, Any] = {
    **_ENCODER_AND_DECODER,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
    "eos_token_id": 2,
}
_MAMBA: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4}

# name -> class of the model, class of the config, arguments of the config
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt2_eager": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "attn_implementation": "eager"}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 6}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "tie_word_embeddings": True}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _GROUPED),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "bert_classifier": ("BertForSequenceClassification", "BertConfig", {**_SIZES, "num_labels": 3}),
    "bert_mlm": ("BertForMaskedLM", "BertConfig", _SIZES),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_VIT, "num_labels": 3}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
    "clip": ("CLIPModel", "CLIPConfig", _CLIP),
    "lora": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "mamba": ("MambaForCausalLM", "MambaConfig", _MAMBA),
    # They make the inputs of their decoder of the labels.
    "t5_labels": ("T5ForConditionalGeneration", "T5Config", _T5),
    "whisper_labels": ("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
    "mbart_labels": ("MBartForConditionalGeneration", "MBartConfig", _MBART),
}


def config_of(name: str) -> Any:
    """Returns the config of a name, without dropout: a plain loop seeds its draws otherwise."""
    import transformers

    kind, config, arguments = CLASSES[name]
    given = {key: value for key, value in arguments.items() if key != "attn_implementation"}
    settings = getattr(transformers, config)(**given, architectures=[kind])
    parts = [
        settings,
        *(getattr(settings, each) for each in ("text_config", "vision_config") if hasattr(settings, each)),
    ]
    for part in parts:
        for key, value in vars(part).items():
            if isinstance(value, float) and ("drop" in key or key == "initializer_dropout"):
                setattr(part, key, 0.0)
    return settings


def base() -> nn.Module:
    """Returns the frozen model under the adapters of `lora_model`, without a cache."""
    import transformers

    config = config_of("lora")
    config.use_cache = False
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def lora_model() -> nn.Module:
    """Returns a Llama with adapters of peft."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model: nn.Module = get_peft_model(base(), adapters)
    return model


def tokens(generator: torch.Generator) -> dict[str, Tensor]:
    """Returns a row as a tokenizer pads it: int64 [LENGTH]; half of the rows have no padding."""
    length = LENGTH
    if torch.rand((), generator=generator) < 0.4:
        length = int(torch.randint(3, LENGTH, (), generator=generator))
    ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
    mask = (torch.arange(LENGTH) < length).long()
    return {"input_ids": torch.where(mask == 1, ids, PAD), "attention_mask": mask}


def _row(name: str, generator: torch.Generator) -> Mapping[str, Any]:
    row: dict[str, Any] = tokens(generator)
    other = tokens(generator)
    pixels = torch.randn(3, 16, 16, generator=generator)
    labels = torch.where(row["attention_mask"] == 1, row["input_ids"], -100)
    kind = int(torch.randint(0, 3, (), generator=generator))
    following = torch.where(other["attention_mask"] == 1, other["input_ids"], -100)
    if name == "bert_classifier":
        return {**row, "labels": kind}
    if name == "vit":
        return {"pixel_values": pixels, "labels": kind}
    decoder = {} if name.endswith("_labels") else {"decoder_input_ids": other["input_ids"]}
    if name in ("t5", "t5_labels", "mbart_labels"):
        return {**row, **decoder, "labels": following}
    if name.startswith("whisper"):
        return {"input_features": torch.randn(8, 24, generator=generator), **decoder, "labels": following}
    if name == "clip":
        return {**row, "pixel_values": pixels}
    return {**row, "labels": labels}


def rows(name: str) -> DataSets:
    """Returns 64 rows of data to train a name with."""
    generator = torch.Generator().manual_seed(7)
    samples = [_row(name, generator) for _ in range(64)]
    return indexed(samples, samples[:8], collate=_pairs if name == "clip" else None)


def _pairs(samples: list[Any]) -> dict[str, Tensor]:
    """Returns images and texts, each with the number of its partner as the target."""
    columns = {name: torch.stack([each[name] for each in samples]) for name in samples[0]}
    return {**columns, "labels": torch.arange(len(samples))}


def source(name: str) -> Callable[[], DataSets]:
    """Returns the source of data of a name, for a job."""

    def data() -> DataSets:
        return rows(name)

    return data


def __getattr__(attribute: str) -> Any:
    """Returns the source ``NAME_data``, for jobs, which name functions of a module."""
    name, _, kind = attribute.rpartition("_")
    if name in CLASSES and kind == "data":
        return source(name)
    raise AttributeError(attribute)
