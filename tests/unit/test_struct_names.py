"""No two structs of one name in two namespaces: a name alone says which family's struct is meant.

Structs inside of others count too. In one namespace several may have the name of one concept, such
as Shared of each configuration, or the specialisations of a template.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.documents import ROOT

HEADERS = sorted((ROOT / "csrc").rglob("*.h"))

# A namespace's begin, its end, a definition; clang-format sees to the form of all three.
SCOPE = re.compile(
    r"^namespace (?P<begin>[\w:]+) \{|^\}  // (?P<end>namespace)"
    r"|^ *(?:struct|class|union|enum class|enum) (?:alignas\(\w+\) )?"
    r"(?P<name>(?!alignas)\w+)[^;{}]*\{",
    re.MULTILINE,
)


def definitions(text: str) -> Iterator[tuple[str, str]]:
    """Pairs of a namespace and a name."""
    namespace = ""
    for found in SCOPE.finditer(re.sub(r"//(?! namespace\b)[^\n]*", "", text)):
        if found["name"]:
            yield namespace, found["name"]
        else:
            namespace = found["begin"] or ""


def ambiguous(texts: Iterable[str]) -> dict[str, set[str]]:
    """The names that several namespaces define, and these namespaces."""
    namespaces = defaultdict(set)
    for text in texts:
        for namespace, name in definitions(text):
            namespaces[name].add(namespace)
    return {name: found for name, found in namespaces.items() if len(found) > 1}


def test_a_name_belongs_to_one_namespace():
    texts = [header.read_text() for header in HEADERS]
    assert len({pair for text in texts for pair in definitions(text)}) > 200
    assert ambiguous(texts) == {}


def test_definitions_are_seen():
    text = """\
namespace ds4s {
struct Declared;  // struct Comment {
template <typename T, template <typename> class Parameter>
class Runner<T, (1 < 2)> : Base<T> {
  struct alignas(16) Plan {
    int x;
  };
  enum class Kind : int { kOne };
};
}  // namespace ds4s

struct Outside {};
"""
    found = [("ds4s", "Runner"), ("ds4s", "Plan"), ("ds4s", "Kind"), ("", "Outside")]
    assert list(definitions(text)) == found
    other = "namespace ds4s::sm90 {\nstruct Plan {\n};\n}  // namespace ds4s::sm90\n"
    assert ambiguous([text, text]) == {}
    assert ambiguous([text, other]) == {"Plan": {"ds4s", "ds4s::sm90"}}
