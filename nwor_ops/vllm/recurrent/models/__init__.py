"""The hybrid models that keep one recurrent state per request: one file for each class of recurrent layers in vLLM."""
