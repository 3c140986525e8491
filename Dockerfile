# All that kvbm runs beside engines: the catalog, its janitor, nats-server, and the probe of their health. compose.yaml
# uses it.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir -c constraints.txt --upgrade pip
RUN pip wheel --no-cache-dir -c constraints.txt --build-constraint constraints.txt --wheel-dir /wheels \
    '.[catalog,s3,azure,redis,crypto,nkeys,parquet]'

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --find-links /wheels \
    'kvbm-ledger[catalog,s3,azure,redis,crypto,nkeys,parquet]' && rm -rf /wheels
RUN install -d -o 65532 -g 65532 /data
USER 65532:65532
WORKDIR /data
# Beyond the loopback the catalog starts with KVBM_CATALOG__ACCESS, a file of callers, or when KVBM_CATALOG__OPEN is
# true.
CMD ["kvbm-catalog", "serve", "--set=catalog.listen=0.0.0.0:7700"]
