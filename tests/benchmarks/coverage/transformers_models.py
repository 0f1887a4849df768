"""transformers: of each type of model one with a head that is trained, with two small layers where it has any."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from models import transformers_loading
from tests.benchmarks.coverage.sample import Batch, Sample

_BATCH, _LENGTH, _WORDS, _CLASSES, _PIXELS = 2, 16, 64, 4, 32
_SAMPLES_OF_SOUND, _FRAMES, _BINS = 4000, 64, 16

_SIZES: Mapping[str, object] = {
    "vocab_size": _WORDS,
    "hidden_size": 32,
    "embedding_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "image_size": _PIXELS,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
"""What a configuration gets of these: those that it has by that name, and that are one number there."""

_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_JAMBA = {
    **_EXPERTS,
    "use_mamba_kernels": False,
    "mamba_dt_rank": 4,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
_T5 = {"d_kv": 8, "decoder_start_token_id": 0}
_SPEECH = {
    "conv_dim": (32, 32),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
}


def _words(index: int) -> Batch:
    words = _whole_numbers(index, 3, _WORDS, _LENGTH)
    return {"input_ids": words, "labels": words}


def _pairs(index: int) -> Batch:
    return {"input_ids": _whole_numbers(index, 3, _WORDS, _LENGTH), "labels": _whole_numbers(index + 1, 3, _WORDS, 8)}


def _images(index: int) -> Batch:
    return {"pixel_values": _numbers(index, 3, _PIXELS, _PIXELS), "labels": _whole_numbers(index, 0, _CLASSES)}


def _sounds(index: int) -> Batch:
    return {"input_values": _numbers(index, _SAMPLES_OF_SOUND), "labels": _whole_numbers(index, 0, _CLASSES)}


def _spectra(index: int) -> Batch:
    return {"input_values": _numbers(index, _FRAMES, _BINS), "labels": _whole_numbers(index, 0, _CLASSES)}


def _speech(index: int) -> Batch:
    return {"input_features": _numbers(index, _BINS, _FRAMES), "labels": _whole_numbers(index, 3, _WORDS, 8)}


def _captions(index: int) -> Batch:
    return {
        "input_ids": _whole_numbers(index, 3, _WORDS, _LENGTH),
        "pixel_values": _numbers(index, 3, _PIXELS, _PIXELS),
    }


@dataclass(frozen=True)
class _Kind:
    """A model with the head that is trained.

    Attributes:
        name: its class.
        batch: what it is trained with.
        options: of its configuration, beside `_SIZES`.
    """

    name: str
    batch: Callable[[int], Batch]
    options: Mapping[str, Any] = field(default_factory=dict)


_KINDS: Mapping[str, _Kind] = {
    "albert": _Kind("AlbertForMaskedLM", _words),
    "bert": _Kind("BertForMaskedLM", _words),
    "big_bird": _Kind("BigBirdForMaskedLM", _words, {"attention_type": "original_full"}),
    "convbert": _Kind("ConvBertForMaskedLM", _words),
    "deberta": _Kind("DebertaForMaskedLM", _words, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta-v2": _Kind("DebertaV2ForMaskedLM", _words, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "distilbert": _Kind("DistilBertForMaskedLM", _words, {"dim": 32, "hidden_dim": 64}),
    "electra": _Kind("ElectraForMaskedLM", _words),
    "esm": _Kind("EsmForMaskedLM", _words, {"mask_token_id": 3}),
    "fnet": _Kind("FNetForMaskedLM", _words),
    "funnel": _Kind("FunnelForMaskedLM", _words, {"block_sizes": [1, 1], "d_head": 8, "d_inner": 64, "n_head": 4}),
    "longformer": _Kind("LongformerForMaskedLM", _words, {"attention_window": 8}),
    "mobilebert": _Kind("MobileBertForMaskedLM", _words, {"intra_bottleneck_size": 32}),
    "modernbert": _Kind("ModernBertForMaskedLM", _words, {"cls_token_id": 1, "sep_token_id": 2}),
    "mpnet": _Kind("MPNetForMaskedLM", _words),
    "nystromformer": _Kind("NystromformerForMaskedLM", _words, {"num_landmarks": 4, "segment_means_seq_len": 16}),
    "roberta": _Kind("RobertaForMaskedLM", _words),
    "roformer": _Kind("RoFormerForMaskedLM", _words),
    "xlm": _Kind("XLMWithLMHeadModel", _words, {"emb_dim": 32}),
    "biogpt": _Kind("BioGptForCausalLM", _words),
    "bloom": _Kind("BloomForCausalLM", _words),
    "codegen": _Kind("CodeGenForCausalLM", _words, {"rotary_dim": 4, "n_ctx": 64}),
    "cohere": _Kind("CohereForCausalLM", _words),
    "ctrl": _Kind("CTRLLMHeadModel", _words, {"dff": 64}),
    "deepseek_v3": _Kind(
        "DeepseekV3ForCausalLM",
        _words,
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "falcon": _Kind("FalconForCausalLM", _words),
    "gemma": _Kind("GemmaForCausalLM", _words, {"head_dim": 8}),
    "gemma2": _Kind("Gemma2ForCausalLM", _words, {"head_dim": 8, "sliding_window": 8}),
    "gpt2": _Kind("GPT2LMHeadModel", _words),
    "gpt_bigcode": _Kind("GPTBigCodeForCausalLM", _words),
    "gpt_neo": _Kind("GPTNeoForCausalLM", _words, {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "gpt_neox": _Kind("GPTNeoXForCausalLM", _words),
    "gptj": _Kind("GPTJForCausalLM", _words, {"rotary_dim": 4}),
    "granite": _Kind("GraniteForCausalLM", _words),
    "jamba": _Kind(
        "JambaForCausalLM",
        _words,
        {**_EXPERTS, "use_mamba_kernels": False, "mamba_dt_rank": 4, "attn_layer_offset": 1, "attn_layer_period": 2},
    ),
    "llama": _Kind("LlamaForCausalLM", _words),
    "mamba": _Kind("MambaForCausalLM", _words, {"state_size": 4, "time_step_rank": 4}),
    "mistral": _Kind("MistralForCausalLM", _words, {"head_dim": 8, "sliding_window": 8}),
    "mixtral": _Kind("MixtralForCausalLM", _words, {**_EXPERTS, "head_dim": 8}),
    "mpt": _Kind("MptForCausalLM", _words),
    "olmo": _Kind("OlmoForCausalLM", _words),
    "olmoe": _Kind("OlmoeForCausalLM", _words, _EXPERTS),
    "openai-gpt": _Kind("OpenAIGPTLMHeadModel", _words),
    "opt": _Kind("OPTForCausalLM", _words, {"word_embed_proj_dim": 32}),
    "phi": _Kind("PhiForCausalLM", _words),
    "phi3": _Kind("Phi3ForCausalLM", _words),
    "qwen2": _Kind("Qwen2ForCausalLM", _words),
    "qwen2_moe": _Kind("Qwen2MoeForCausalLM", _words, {**_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3": _Kind("Qwen3ForCausalLM", _words, {"head_dim": 8}),
    "recurrent_gemma": _Kind(
        "RecurrentGemmaForCausalLM", _words, {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8}
    ),
    "stablelm": _Kind("StableLmForCausalLM", _words),
    "starcoder2": _Kind("Starcoder2ForCausalLM", _words),
    "xglm": _Kind("XGLMForCausalLM", _words, {"attention_heads": 4}),
    "xlnet": _Kind("XLNetLMHeadModel", _words, {"d_inner": 64}),
    "bart": _Kind("BartForConditionalGeneration", _pairs),
    "blenderbot": _Kind("BlenderbotForConditionalGeneration", _pairs),
    "led": _Kind(
        "LEDForConditionalGeneration",
        _pairs,
        {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    ),
    "m2m_100": _Kind("M2M100ForConditionalGeneration", _pairs),
    "marian": _Kind("MarianMTModel", _pairs),
    "mbart": _Kind("MBartForConditionalGeneration", _pairs),
    "mt5": _Kind("MT5ForConditionalGeneration", _pairs, _T5),
    "pegasus": _Kind("PegasusForConditionalGeneration", _pairs),
    "t5": _Kind("T5ForConditionalGeneration", _pairs, _T5),
    "beit": _Kind("BeitForImageClassification", _images),
    "convnext": _Kind("ConvNextForImageClassification", _images, {**_STAGES, "num_stages": 2}),
    "dinov2": _Kind("Dinov2ForImageClassification", _images),
    "mobilevit": _Kind("MobileViTForImageClassification", _images, {"hidden_sizes": [16, 24, 32], "patch_size": 2}),
    "regnet": _Kind("RegNetForImageClassification", _images, _STAGES),
    "resnet": _Kind("ResNetForImageClassification", _images, _STAGES),
    "segformer": _Kind(
        "SegformerForImageClassification",
        _images,
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
    ),
    "swin": _Kind(
        "SwinForImageClassification",
        _images,
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "patch_size": 4, "window_size": 4},
    ),
    "vit": _Kind("ViTForImageClassification", _images),
    "audio-spectrogram-transformer": _Kind(
        "ASTForAudioClassification", _spectra, {"max_length": _FRAMES, "num_mel_bins": _BINS}
    ),
    "hubert": _Kind("HubertForSequenceClassification", _sounds, _SPEECH),
    "sew": _Kind("SEWForSequenceClassification", _sounds, {**_SPEECH, "squeeze_factor": 2}),
    "wav2vec2": _Kind("Wav2Vec2ForSequenceClassification", _sounds, _SPEECH),
    "wavlm": _Kind("WavLMForSequenceClassification", _sounds, _SPEECH),
    "whisper": _Kind(
        "WhisperForConditionalGeneration",
        _speech,
        {"num_mel_bins": _BINS, "max_source_positions": _FRAMES // 2, "max_target_positions": 32},
    ),
    "clip": _Kind("CLIPModel", _captions, {"text_config": _SIZES, "vision_config": _SIZES, "projection_dim": 32}),
}


def missing() -> str | None:
    """Why transformers cannot be used, and what to do; None if it can be."""
    return transformers_loading.missing()


def versions() -> dict[str, str]:
    """By name."""
    return {"transformers": importlib.metadata.version("transformers")}


def families() -> list[str]:
    """Types of models."""
    return list(_KINDS)


def model_of(family: str) -> str:
    """The class with a head.

    Raises:
        ValueError: there is none of that type.
    """
    if family not in _KINDS:
        raise ValueError(f"no model of the type {family!r} is known; there are {', '.join(_KINDS)}")
    return _KINDS[family].name


def build(model: str) -> Sample:
    """One of the classes, which computes its own loss."""
    family, kind = next((family, kind) for family, kind in _KINDS.items() if kind.name == model)
    transformers: Any = transformers_loading.import_transformers()
    known = transformers.AutoConfig.for_model(family)
    sizes = {name: size for name, size in _SIZES.items() if type(getattr(known, name, None)) in (int, type(None))}
    sizes = {name: size for name, size in sizes.items() if name in known.to_dict() or name in known.attribute_map}
    config = transformers.AutoConfig.for_model(family, **{**sizes, "num_labels": _CLASSES, **kind.options})
    loss = _loss_of_pairs if kind.batch is _captions else _loss
    return Sample(getattr(transformers, model)(config), loss, kind.batch)


def _loss(model: nn.Module, **batch: Tensor) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _loss_of_pairs(model: nn.Module, **batch: Tensor) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


def _whole_numbers(index: int, low: int, high: int, *sizes: int) -> Tensor:
    return torch.randint(low, high, (_BATCH, *sizes), generator=torch.Generator().manual_seed(index))


def _numbers(index: int, *sizes: int) -> Tensor:
    return torch.randn(_BATCH, *sizes, generator=torch.Generator().manual_seed(index))
