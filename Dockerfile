# The catalog service, as compose.yaml runs it.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --wheel-dir /wheels '.[catalog]'

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --find-links /wheels 'kvbm-ledger[catalog]' && rm -rf /wheels
USER 65532:65532
WORKDIR /tmp
CMD ["kvbm-catalog", "serve", "--set=catalog.listen=0.0.0.0:7700"]
