"""Stop strings in text that comes in pieces."""

from trackway.model_api.stream_decoder import StopStrings


def passed(stops: StopStrings, *pieces: str) -> list[str]:
    return [*(stops.push(piece) for piece in pieces if stops.found is None), stops.rest()]


def test_a_stop_in_one_piece_cuts_there() -> None:
    assert passed(StopStrings(["END"], False), "one END two") == ["one ", ""]


def test_what_may_be_the_beginning_of_a_stop_waits_until_it_is_not() -> None:
    assert passed(StopStrings(["END"], False), "oneE", "N", "x", "EN") == ["one", "", "ENx", "", "EN"]


def test_a_stop_over_three_pieces_is_found_and_nothing_of_it_passes() -> None:
    stops = StopStrings(["END"], False)
    assert passed(stops, "oneE", "N", "D two", "never read") == ["one", "", "", ""]
    assert stops.found == "END"


def test_the_first_of_several_stops_in_the_text_counts() -> None:
    assert passed(StopStrings(["b", "a"], False), "xay b") == ["x", ""]


def test_an_included_stop_is_the_end_of_the_text() -> None:
    assert passed(StopStrings(["END"], True), "one EN", "D two") == ["one ", "END", ""]


def test_without_stops_everything_passes_at_once() -> None:
    assert passed(StopStrings([], False), "a", "b") == ["a", "b", ""]
