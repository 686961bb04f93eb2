"""Configurations check themselves, where they are made."""

from __future__ import annotations

import numpy as np
import pytest
from support.values import Hostile

from ctxcache import (
    AttentionLayerConfig,
    ContextCacheConfig,
    DeploymentConfig,
    DeploymentError,
    EngineConfig,
    LayerType,
    RecurrentStateConfig,
    SpecDecodeConfig,
    validate_context_cache_deployment,
)

ATTENTION_LAYER = AttentionLayerConfig(1, 4)
ENGINE = EngineConfig((LayerType.ATTENTION,), (ATTENTION_LAYER,))


WRONG = [None, "x", b"x", 1.5, float("nan"), [], {}, object(), np.zeros(2), [1.0], Hostile()]


@pytest.mark.parametrize(
    "make",
    [
        lambda value: EngineConfig(value, (ATTENTION_LAYER,)),
        lambda value: EngineConfig((LayerType.ATTENTION,), value),
        lambda value: EngineConfig((LayerType.ATTENTION,), (value,)),
        lambda value: EngineConfig((LayerType.RECURRENT,), (), value),
        lambda value: EngineConfig((LayerType.ATTENTION,), (ATTENTION_LAYER,), kv_dtype=value),
        lambda value: EngineConfig((LayerType.ATTENTION,), (ATTENTION_LAYER,), hidden_dtype=value),
        lambda value: RecurrentStateConfig(1, 1, 1, 1, 1, dtype=value),
        SpecDecodeConfig,
        DeploymentConfig,
        lambda value: DeploymentConfig(ENGINE, "draft" if value is None else value),
        lambda value: DeploymentConfig(ENGINE, None, "spec" if value is None else value),
        lambda value: ContextCacheConfig(enabled=value),
        lambda value: ContextCacheConfig(page_sanitizer=value),
        lambda value: ContextCacheConfig(hash_key="16 bytes of text" if value is None else value),
        lambda value: ContextCacheConfig(max_records=value),
        validate_context_cache_deployment,
    ],
)
@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_configuration_checks_itself(make, value):
    """A value of another type is a `DeploymentError` where the configuration is made, not something else later."""
    with pytest.raises(DeploymentError):
        make(value)


def test_a_hash_key_is_kept_as_it_was():
    """A key given as a bytearray is copied: overwriting the secret afterwards does not change what the config says."""
    secret = bytearray(range(16))
    config = ContextCacheConfig(hash_key=secret)
    secret[:] = bytes(16)
    assert config.hash_key == bytes(range(16))
    assert hash(config) == hash(ContextCacheConfig(hash_key=bytes(range(16))))
