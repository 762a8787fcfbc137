# An init container that brings pdpool's connector and plugin into an unchanged image of SGLang. It copies them to the
# volume at /target. First run `make dist`. Then build from the root of the checkout:
#   docker build -f images/sglang/plugin.Dockerfile -t NAME .
ARG BASE=python:3.11-slim
FROM ${BASE}
# Only what SGLang's images lack. All three are pure Python, so the version of Python does not matter.
RUN --mount=type=bind,source=dist,target=/dist \
    python3 -m pip install --no-cache-dir --no-compile --no-deps --target /pdpool \
    /dist/pdpool-*.whl ifaddr==0.2.0 pyjwt==2.15.1
USER 65532:65532
ENTRYPOINT ["cp", "-rT", "/pdpool", "/target"]
