"""One recurrent state per request instead of K + 1, for Gated DeltaNet and KDA layers in vLLM's V2 runner on CUDA.

``plugin`` checks the configuration and installs the rest in vLLM. ``records`` defines the contents of a page. ``layer``
is the base of our subclasses of vLLM layers: ``qwen`` (with ``qwen4``), ``kimi``, ``olmo``, ``glm`` and ``bailing``.
``metadata`` has our metadata builder, a subclass of the one in vLLM. ``engine`` folds the layers of a KV-cache group.
``align`` and ``blocks`` handle prefix caching and KV connectors. ``audit`` compares every state with a scheme that
stores all states. Cursors, folds and counts of skipped requests are those of :mod:`nwor_ops.recurrent`.

``layer``, its subclasses and ``metadata`` import vLLM. They are imported when an engine asks for one state.
"""
