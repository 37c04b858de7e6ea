"""`search` over a folder of documents: what is found, in which words it is told, what a folder may be."""

import json
import logging
from pathlib import Path

import pytest
from pydantic import JsonValue

from trackway.tools.base import ToolConfig, ToolInputError
from trackway.tools.builtin.search import CorpusLimits, SearchTool, cut, read_folder, result_text
from trackway.tools.core.limits import ToolLimits
from trackway.tools.loading import load_tools
from trackway.tools.settings import ToolsSettings
from trackway.wire.tools import RetrievedDocument, ScoredDocument

pytestmark = pytest.mark.anyio

PARIS = "# Paris\n\nParis is the capital of France. Its river is the Seine.\n"
CORPUS = [
    {"id": "7", "contents": '"Berlin"\nBerlin is the capital of Germany, on the Spree.'},
    {"id": 8, "title": "Tokyo", "text": "東京は日本の首都です。"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    (folder / "below").mkdir(parents=True)
    (folder / "paris.md").write_text(PARIS)
    (folder / "below" / "rome.txt").write_text("Rome is the capital of Italy.\n")
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, CORPUS)) + "\n\n")
    (folder / "table.csv").write_text("capital,capital,capital\n")
    return folder


async def started(folder: Path, **config: JsonValue) -> SearchTool:
    tool = SearchTool.default({"documents": str(folder), **config})
    await tool.start()
    return tool


async def found(tool: SearchTool, *queries: str) -> list[list[str | int]]:
    return [[hit.document.id for hit in documents] for documents in await tool.retrieve(queries, None)]


async def test_the_best_passage_comes_first_and_only_those_with_a_word_of_the_query_come(folder: Path) -> None:
    tool = await started(folder)

    assert await found(tool, "capital on the Spree", "the SEINE", "nowhere") == [
        ["7", "below/rome.txt#0", "paris.md#0"],
        ["paris.md#0", "7", "below/rome.txt#0"],
        [],
    ]
    assert await found(tool, "日本", "!?") == [["8"], []]


async def test_scores_fall_and_topk_bounds_their_number(folder: Path) -> None:
    (documents,) = await (await started(folder, topk=2)).retrieve(["capital of France"], None)

    scores = [hit.score for hit in documents]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    assert scores[1] > 0


async def test_the_text_is_verls(folder: Path) -> None:
    tool = await started(folder, topk=1)

    result = await tool.execute("id", {"query_list": ["river Seine", "Spree", "nowhere"]})

    assert json.loads(result.text) == {
        "result": 'Doc 1 (Title: "Paris")\nParis is the capital of France. Its river is the Seine.\n---\n'
        'Doc 1 (Title: "Berlin")\nBerlin is the capital of Germany, on the Spree.\n---\nNo search results found.'
    }
    assert result.metrics == {"query_count": 3.0, "total_results": 2.0}


async def test_several_documents_are_numbered_and_text_keeps_its_letters() -> None:
    documents = [
        ScoredDocument(document=RetrievedDocument(contents=text), score=1.0) for text in ('"A"\none\ntwo', '"É"\n三')
    ]

    assert result_text([documents]) == (
        '{"result": "Doc 1 (Title: \\"A\\")\\none\\ntwo\\n\\nDoc 2 (Title: \\"É\\")\\n三"}'
    )
    assert result_text([[], []]) == '{"result": "No search results found."}'


@pytest.mark.parametrize("arguments", [{"query": "Seine"}, {"query_list": "Seine"}, {"query_list": ["Seine"]}])
async def test_one_query_is_taken_in_each_way_that_models_write_it(
    folder: Path, arguments: dict[str, JsonValue]
) -> None:
    tool = await started(folder)

    assert tool.coerce(arguments) == {"query_list": ["Seine"]}


@pytest.mark.parametrize("queries", [[], ["a"] * 65, [1], [None], ["x" * 8193], 7, None])
async def test_queries_that_are_none_are_told_to_the_model(folder: Path, queries: JsonValue) -> None:
    with pytest.raises(ToolInputError, match="expected"):
        await (await started(folder)).execute("id", {"query_list": queries})


async def test_an_index_is_saved_and_reloaded_while_the_documents_stay_the_same(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = str(tmp_path / "index")
    with caplog.at_level(logging.INFO, "trackway.tools"):
        texts = [await found(await started(folder, index=index), "river") for _ in range(2)]
        (folder / "paris.md").write_text(PARIS.replace("river", "water"))
        texts.append(await found(await started(folder, index=index), "river"))

    assert texts == [[["paris.md#0"]], [["paris.md#0"]], [[]]]
    told = [record.getMessage().split(" in ")[0] for record in caplog.records if "the index of" in record.getMessage()]
    assert [text.split(" (")[0] for text in told] == [
        "search: built the index of 4 passages of 3 files",
        "search: loaded the index of 4 passages of 3 files",
        "search: built the index of 4 passages of 3 files",
    ]


async def test_a_broken_saved_index_is_made_anew(folder: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    await started(folder, index=str(index))
    (saved,) = index.iterdir()
    (saved / "data.csc.index.npy").write_bytes(b"broken")

    assert await found(await started(folder, index=str(index)), "Seine") == [["paris.md#0"]]
    assert (await started(folder, index=str(index))).embedded
    assert [path.name for path in index.iterdir()] == [saved.name]


def test_long_texts_are_cut_at_blank_lines_and_spaces() -> None:
    text = "one two\n\nthree\n \nfour five six seven\n\n" + "x" * 25

    assert list(cut(text, 14)) == ["one two\n\nthree", "four five six", "seven", "x" * 14, "x" * 11]
    assert list(cut("", 14)) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"contents": "a"}\n{"body": "b"}', "a.jsonl, line 2: contents: expected this key"),
        ("a.jsonl", b"not json", "a.jsonl, line 1: Invalid JSON"),
        ("a.txt", b"\xff\xfe", "a.txt: expected UTF-8"),
        ("a.jsonl", b'{"contents": "..."}', "expected words in 1 passages, got none"),
        ("a.txt", b"", "expected passages in"),
        ("a.pdf", b"pdf", "got none in 0 files"),
    ],
)
async def test_documents_that_cannot_be_used_keep_the_server_from_starting(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ValueError, match=message):
        await started(tmp_path)


def test_a_folder_is_bounded_in_files_and_bytes(folder: Path) -> None:
    assert read_folder(folder, CorpusLimits(max_files=3)).files == 3
    with pytest.raises(ValueError, match=r"at most 2 files in .*, got 3; raise max_files"):
        read_folder(folder, CorpusLimits(max_files=2))
    with pytest.raises(ValueError, match=r"at most 10 bytes in .*, got \d+; raise max_bytes, or serve"):
        read_folder(folder, CorpusLimits(max_bytes=10))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"documents": "a", "retrieval_service_url": "http://b/retrieve"}, "either documents or"),
        ({"retrieval_service_url": "ftp://b"}, "retrieval_service_url: URL scheme"),
        ({"retrieval_service_url": "http://me:secret@b/"}, "without a password"),
        ({"topk": 0}, "topk: Input should be greater"),
        ({"folder": "a"}, "folder: Extra inputs"),
    ],
)
def test_a_wrong_config_is_refused_by_name(config: ToolConfig, message: str) -> None:
    with pytest.raises(ValueError, match=f"tool_config.search: {message}|tool_config.search: expected .*{message}"):
        SearchTool.default(config)


def test_verls_config_words_are_understood() -> None:
    tool = SearchTool.default(
        {"retrieval_service_url": "http://r/retrieve", "num_workers": 9, "rate_limit": 5, "default_timeout": 7}
    )

    assert (tool._config.max_in_flight, tool._config.timeout, tool.embedded) == (5, 7.0, False)


async def test_a_search_without_a_source_cannot_start() -> None:
    (tool,) = load_tools(["search"], [], {})
    assert isinstance(tool, SearchTool)

    with pytest.raises(ValueError, match=r"expected documents .* or retrieval_service_url, got neither"):
        await tool.start()
    assert "search" not in ToolsSettings().tools


def test_the_servers_limits_may_stand_in_its_config() -> None:
    config: ToolConfig = dict.fromkeys(ToolLimits.model_fields, 1)

    assert SearchTool.default(config).config == config
