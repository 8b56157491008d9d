"""One recurrent state per request in place of 1 + K, for Gated DeltaNet layers under vLLM's V2 runner on CUDA.

``plugin`` decides and puts the rest into vLLM, ``records`` says what lies in a page, ``layer`` and ``metadata`` are
subclasses of vLLM's layer and of its metadata builder, ``engine`` is what the layers of one engine share, ``audit``
compares every state with that of a scheme that keeps them all. ``layer`` and ``metadata`` import vLLM: they are
imported when an engine asks for them.
"""
