# The planner alone: no torch, no SGLang.
FROM python:3.11-slim

COPY . /tmp/rfork
RUN python3 -m pip install --no-cache-dir "/tmp/rfork[planner]" \
 && rm -rf /tmp/rfork \
 && useradd --system --uid 10001 rfork
USER 10001
EXPOSE 7700
ENTRYPOINT ["rfork", "planner", "--host", "0.0.0.0", "--port", "7700"]
