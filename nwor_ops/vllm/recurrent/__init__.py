"""One recurrent state per request instead of K + 1, for Gated DeltaNet and KDA layers in vLLM's V2 runner on CUDA.

``plugin`` checks the configuration and installs the rest in vLLM. ``page`` defines the contents of a page, and folds
the layers of a KV-cache group. ``layer`` is the base of our subclasses of vLLM layers, which are in ``models``.
``metadata`` has our metadata builder, a subclass of the one in vLLM. ``prefix_caching`` and ``block_reuse`` follow the
blocks of a request, ``connectors`` keeps pages with a record apart from others. Cursors, folds and counts of skipped
requests are those of :mod:`nwor_ops.recurrent`.

``layer``, its subclasses and ``metadata`` import vLLM. They are imported when an engine asks for one state.
"""
