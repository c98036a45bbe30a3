# Two images from one file:
#   docker build --target gateway -t baton-gateway .     HTTP front and router; no torch, no model
#   docker build --target worker  -t baton-worker  .     prefill, decode and mixed workers; the default
# TORCH_INDEX_URL names the index that torch comes from; empty means the default one.

FROM python:3.11-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
RUN python -m venv /opt/baton && useradd --create-home baton
ENV PATH=/opt/baton/bin:$PATH
WORKDIR /src
COPY constraints.txt ./

FROM base AS gateway-build
COPY pyproject.toml LICENSE NOTICE ./
COPY core core
COPY kernels kernels
COPY kvtransfer kvtransfer
COPY kvindex kvindex
COPY engine engine
COPY services services
RUN pip install -c constraints.txt .

FROM base AS worker-build
ARG TORCH_INDEX_URL=""
RUN pip install -c constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY pyproject.toml LICENSE NOTICE ./
COPY core core
COPY kernels kernels
COPY kvtransfer kvtransfer
COPY kvindex kvindex
COPY engine engine
COPY services services
RUN pip install -c constraints.txt ".[worker]"

FROM base AS gateway
COPY --from=gateway-build /opt/baton /opt/baton
USER baton
WORKDIR /home/baton
EXPOSE 8000
ENTRYPOINT ["baton"]
CMD ["gateway", "--host", "0.0.0.0", "--port", "8000"]

FROM base AS worker
ENV OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
COPY --from=worker-build /opt/baton /opt/baton
USER baton
WORKDIR /home/baton
ENTRYPOINT ["baton"]
CMD ["mixed", "--help"]
