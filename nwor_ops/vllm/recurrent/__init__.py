"""One recurrent state per request in place of 1 + K, for layers of Gated DeltaNet and KDA under vLLM's V2 runner on
CUDA.

``plugin`` decides and puts the rest into vLLM, ``records`` says what lies in a page, ``layer`` is what our subclasses
of vLLM's layers have in common, ``qwen``, ``kimi`` and ``olmo`` are these, ``metadata`` one of its metadata builder,
``engine`` is what the layers of one engine share, ``audit`` compares every state with that of a scheme that keeps them
all.
``layer``, ``qwen``, ``kimi``, ``olmo`` and ``metadata`` import vLLM: they are imported when an engine asks for them.
"""
