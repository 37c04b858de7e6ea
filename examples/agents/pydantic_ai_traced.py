# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai]==2.68.0", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"]
# ///
r"""An agent of pydantic-ai whose own OpenTelemetry spans join the trace of its rollout.

MLflow also needs the experiment: "OTEL_EXPORTER_OTLP_HEADERS": "x-mlflow-experiment-id=1".

export TRACKWAY_EXTERNAL__COMMAND='["uv", "run", "examples/agents/pydantic_ai_traced.py"]'
export TRACKWAY_EXTERNAL__ENVIRONMENT='{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}' && trackway up
trackway data make-tiny rows --agent-name external
trackway train --config-name tiny_demo data.train_files=$PWD/rows/train.parquet data.val_files=$PWD/rows/test.parquet
"""

import json
import os
import sys

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits

provider = TracerProvider()
if "TRACEPARENT" in os.environ:  # the rollout is traced
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    context.attach(extract({"traceparent": os.environ["TRACEPARENT"]}))
    Agent.instrument_all()
agent = Agent("openai:policy", retries=3)


@agent.tool_plain
def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    if "**" in expression or set(expression) - set("0123456789+-*/(). "):
        return "expected numbers and + - * / ( )"
    try:
        return str(eval(expression))
    except (SyntaxError, ArithmeticError, TypeError) as error:
        return str(error)


question = "\n".join(message["content"] for message in json.load(sys.stdin)["prompt"])
try:
    print(agent.run_sync(question, usage_limits=UsageLimits(request_limit=4)).output)
except (UnexpectedModelBehavior, UsageLimitExceeded) as error:  # the model's own fault: the rollout counts
    print(error)
provider.shutdown()
