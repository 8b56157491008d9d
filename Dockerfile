# vLLM's image with nwor_ops. docs/install.md says how to build and check it.
FROM vllm/vllm-openai:v0.33.0
COPY dist/nwor_ops-*.whl /tmp/
RUN uv pip install --system "$(ls /tmp/nwor_ops-*.whl)[cli]"
