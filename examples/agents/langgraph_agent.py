# /// script
# requires-python = ">=3.11"
# dependencies = ["langgraph==1.2.22", "langchain-openai==1.7.3"]
# ///
r"""A graph of LangGraph: the model and its calculator in turns.

export TRACKWAY_EXTERNAL__COMMAND='["uv", "run", "examples/agents/langgraph_agent.py"]' && trackway up
trackway data make-tiny rows --agent-name external
trackway train --config-name tiny_demo data.train_files=$PWD/rows/train.parquet data.val_files=$PWD/rows/test.parquet
"""

import json
import sys

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    if "**" in expression or set(expression) - set("0123456789+-*/(). "):
        return "expected numbers and + - * / ( )"
    try:
        return str(eval(expression))
    except (SyntaxError, ArithmeticError, TypeError) as error:
        return str(error)


model = ChatOpenAI(model="policy").bind_tools([calculator])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([calculator]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", lambda state: tools_condition(state) if len(state["messages"]) < 9 else END)
graph.add_edge("tools", "model")
state = graph.compile().invoke({"messages": json.load(sys.stdin)["prompt"]})
print(state["messages"][-1].content)
