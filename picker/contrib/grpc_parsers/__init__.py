"""Request bodies of gRPC services, read with generated code.

- `vllm`: vLLM's engine service · `vertexai`: Vertex AI's PredictionService
- `_frames`: gRPC's framing of messages · `_generated`: written by scripts/gen_protos.py
"""
