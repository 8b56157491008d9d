"""One recurrent state per request in place of 1 + K, for layers of Gated DeltaNet and KDA under vLLM's V2 runner on
CUDA.

``plugin`` decides and installs the rest in vLLM. ``records`` defines the contents of a page. ``layer`` is the base of
our subclasses of vLLM's layers: ``qwen`` (with ``qwen4``), ``kimi``, ``olmo`` and ``bailing``. ``metadata`` has our
subclass of vLLM's metadata builder. ``engine`` holds what the layers of one engine share. ``audit`` compares every
state with a scheme that stores all states.

``layer``, its subclasses and ``metadata`` import vLLM. They are imported when an engine asks for one state.
"""
