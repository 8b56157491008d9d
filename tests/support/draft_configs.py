"""Configurations of engines and attention groups, as the refusals read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def with_settings(config: Any, **changes: Any) -> Any:
    """Return the configuration after these changes; ``a__b`` is ``config.a.b``."""
    for path, value in changes.items():
        thing, (*parents, name) = config, path.split("__")
        for parent in parents:
            thing = vars(thing).setdefault(parent, SimpleNamespace())
        setattr(thing, name, value)
    return config


def engine_config(**changes: Any) -> Any:
    """Return a configuration that may have draft graphs, with the given changes to ``a.b``."""
    config = SimpleNamespace(
        use_v2_model_runner=True,
        parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1, use_ubatching=False),
        speculative_config=SimpleNamespace(
            method="draft_model",
            draft_model_config=SimpleNamespace(is_multimodal_model=False),
            num_speculative_tokens_per_batch_size=None,
            enable_adaptive_verification=False,
        ),
        model_config=SimpleNamespace(is_multimodal_model=False, is_encoder_decoder=False),
        lora_config=None,
        watermark_config=None,
        kv_transfer_config=None,
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
        additional_config={"nwor": {"draft_graphs": True}},
    )
    return with_settings(config, **changes)


class FullAttentionSpec: ...


class MLAAttentionSpec: ...


class MambaSpec: ...


def group(backend: str, spec: Any = FullAttentionSpec, in_place: bool = True) -> Any:
    return SimpleNamespace(
        backend=SimpleNamespace(get_name=lambda: backend),
        kv_cache_spec=spec(),
        supports_draft_decode_metadata_update=in_place,
    )
