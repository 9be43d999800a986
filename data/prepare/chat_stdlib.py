"""Conversations about a Python module, made of its docstrings and signatures: `--source=chat-stdlib`.

Each module, class and function with a docstring has a conversation. Its answers have from one word to a complete
docstring, unless that is long: a small network learns little from it. A hash of the name chooses questions and
wordings, so equal modules give equal conversations.
"""

import ast
import copy
import hashlib
import re
from collections.abc import Iterator, Sequence

from data.conversation import Message

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function
Turn = tuple[str, str]  # a question, "|" between its wordings, and the answer

TESTS = {"test", "tests", "idle_test"}  # parts of names of modules that are tests
ABOUT = "What does {} do?|What is {} for?|Describe {}.|Explain {} in short.|Tell me about {}."
MORE = "Explain more.|Tell me more.|Show its docstring.|Give me the details."
PLACE = "Which module is it in?|Where is it defined?|Which module?"
LONGEST = 300  # characters of a docstring that is shown
NUMBERS = ("None", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")
GREETING = ("Hello!|Hi!|Hello|Good morning.", "Hello! Ask me about Python's standard library.")
THANKS = ("Thanks.|Thank you!|Thanks!", "You are welcome.")


def conversations_of(source_code: str, module: str) -> Iterator[list[Message]]:
    """Yield the conversations about a module of this name; none of tests, and none if its code cannot be parsed."""
    if TESTS & set(module.split(".")):
        return
    try:
        tree = ast.parse(source_code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    if turns := _of_module(tree, module):
        yield _conversation(module, turns)
    for node in tree.body:
        owner, functions = module, [node]
        if isinstance(node, ast.ClassDef):
            owner, functions = f"{module}.{node.name}", _functions(node)
            if turns := _of_class(node, module):
                yield _conversation(owner, turns)
        for function in functions:
            if isinstance(function, Function) and (turns := _of_function(function, owner, module)):
                yield _conversation(f"{owner}.{function.name}", turns)


def _conversation(name: str, turns: Sequence[Turn]) -> list[Message]:
    """Return the first of the turns, and two to seven others in another order, drawn from the name."""
    first, *others = turns
    others.sort(key=lambda turn: _draw(name, f"order of {turn[0]}", 2**32))
    turns = [first, *others[: 2 + _draw(name, "turns", 6)]]
    if _draw(name, "greeting", 8) == 0:
        turns.insert(0, GREETING)
    if _draw(name, "thanks", 8) == 0:
        turns.append(THANKS)
    messages = []
    for question, answer in turns:
        wordings = question.split("|")
        question = wordings[_draw(name, f"wording of {question}", len(wordings))].format(name)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def _of_module(tree: ast.Module, module: str) -> list[Turn]:
    docstring = _docstring(tree)
    if not docstring:
        return []
    classes = [one.name for one in tree.body if isinstance(one, ast.ClassDef) and not one.name.startswith("_")]
    functions = [one.name for one in _functions(tree)]
    return [
        (ABOUT, _summary(docstring)),
        *_more(docstring),
        ("Which classes does it have?|Which classes does it define?", _listed(classes)),
        ("Which functions does it have?|Name its functions.", _listed(functions)),
        ("How do I import it?|Show how to import it.", f"import {module}"),
    ]


def _of_class(node: ast.ClassDef, module: str) -> list[Turn]:
    docstring = _docstring(node)
    if not docstring or node.name.startswith("_"):
        return []
    methods = _functions(node)
    constructors = [one for one in node.body if isinstance(one, Function) and one.name == "__init__"]
    bases = [ast.unparse(base) for base in node.bases]
    return [
        (ABOUT, _summary(docstring)),
        *_more(docstring),
        ("Which methods does it have?|Name its methods.|What can it do?", _listed([one.name for one in methods])),
        ("Which class does it extend?|What is its base class?", _listed(bases) if bases else "object"),
        ("Is it a class or a function?|Is it a function or a class?", "A class."),
        (PLACE, module),
        *(("How do I make one?|Show its constructor.", _signature(one, node.name, True)) for one in constructors),
        *(
            (f"What does its method {one.name} do?|What is its {one.name} for?|And {one.name}?", _summary(text))
            for one in methods
            if (text := _docstring(one))
        ),
    ]


def _of_function(node: Function, owner: str, module: str) -> list[Turn]:
    docstring = _docstring(node)
    if not docstring or node.name.startswith("_"):
        return []
    is_method = owner != module
    arguments = _arguments(node, is_method)
    positional = [*arguments.posonlyargs, *arguments.args]
    names = [one.arg for one in positional]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [one.arg for one in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    count = NUMBERS[len(names)] if len(names) < len(NUMBERS) else str(len(names))
    defaults = [*zip(positional[::-1], arguments.defaults[::-1]), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return [
        (ABOUT, _summary(docstring)),
        *_more(docstring),
        (
            "Show its signature.|What is its signature?|How is it called?|How do I call it?",
            _signature(node, node.name, is_method),
        ),
        ("Which parameters does it have?|Name its parameters.|What does it take?", _listed(names)),
        ("How many parameters does it have?|How many parameters?", f"{count}."),
        ("Is it a function or a method?|Is it a method or a function?", "A method." if is_method else "A function."),
        ("Is it a coroutine?|Must I await it?", "Yes." if isinstance(node, ast.AsyncFunctionDef) else "No."),
        (PLACE, module),
        *(
            (f"What is the default of {one.arg}?|And the default of {one.arg}?", ast.unparse(value))
            for one, value in defaults
            if value
        ),
    ]


def _more(docstring: str) -> list[Turn]:
    """Return the turn that shows a complete docstring, if it is more than its summary and not long."""
    return [(MORE, docstring)] if docstring != _summary(docstring) and len(docstring) <= LONGEST else []


def _docstring(node: Documented) -> str:
    """Return the docstring without its indentation, as UTF-8 can encode it; empty if there is none."""
    return (ast.get_docstring(node) or "").encode(errors="replace").decode().strip()


def _summary(docstring: str) -> str:
    """Return the first sentence of the first paragraph, in one line."""
    return re.split(r"(?<=\w\w[.!?]) ", " ".join(docstring.split("\n\n")[0].split()))[0]


def _arguments(function: Function, is_method: bool) -> ast.arguments:
    """Return the arguments that a caller gives: a method's first argument is its object."""
    arguments = copy.deepcopy(function.args)
    is_static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)
    if is_method and not is_static:
        (arguments.posonlyargs or arguments.args)[:1] = []
    return arguments


def _signature(function: Function, name: str, is_method: bool) -> str:
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{name}({ast.unparse(_arguments(function, is_method))}){returns}"


def _functions(node: ast.Module | ast.ClassDef) -> list[Function]:
    return [one for one in node.body if isinstance(one, Function) and not one.name.startswith("_")]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "None."


def _draw(name: str, what: str, choices: int) -> int:
    """Return a number below `choices`, drawn from a name and a purpose."""
    return int.from_bytes(hashlib.sha256(f"{name}: {what}".encode()).digest()[:8], "big") % choices
