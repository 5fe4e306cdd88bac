"""Small mistakes in a source file, which tools/mutants.py plants one at a time.

edits(path, text) gives every candidate of one C++ or Python file, and a rule names the kind of mistake. C++ needs no
parser: a tokenizer that knows comments, strings and preprocessor lines is enough, as style puts spaces around binary
operators and none inside angle brackets. An edit of something that is no expression does not compile, and is no mutant.

planted(text, choices) writes several mutants into one text: at run time a number selects one of them, or none.
"""
import ast
import bisect
import io
import re
import tokenize
from typing import NamedTuple


class Edit(NamedTuple):
    """text[begin:end] becomes new."""
    rule: str
    begin: int
    end: int
    new: str

    def apply(self, text):
        return text[:self.begin] + self.new + text[self.end:]


class Token(NamedTuple):
    kind: str  # name, number, string or op
    text: str
    begin: int
    end: int


# Operators and the mistaken ones. Names are those of calls, of Highway and of the standard library.
OPERATORS = {
    "compare": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
                "is": "is not", "is not": "is", "in": "not in", "not in": "in"},
    "arithmetic": {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*",
                   "+=": "-=", "-=": "+=", "*=": "/=", "/=": "*="},
    "logic": {"&&": "||", "||": "&&", "and": "or", "or": "and", "&": "|", "|": "&"},
}
NAMES = {
    "compare": {"Lt": "Le", "Le": "Lt", "Gt": "Ge", "Ge": "Gt", "Eq": "Ne", "Ne": "Eq",
                "lower_bound": "upper_bound", "upper_bound": "lower_bound"},
    "arithmetic": {"Add": "Sub", "Sub": "Add", "Mul": "Add", "Div": "Mul", "MulAdd": "NegMulAdd", "NegMulAdd": "MulAdd",
                   "MulSub": "MulAdd"},
    "logic": {"And": "Or", "Or": "And", "AllTrue": "AllFalse", "AllFalse": "AllTrue", "any_of": "all_of",
              "all_of": "any_of", "any": "all", "all": "any"},
    "minmax": {a: b for pair in (("min", "max"), ("Min", "Max"), ("fmin", "fmax"), ("ReduceMin", "ReduceMax"),
                                 ("minimum", "maximum"), ("amin", "amax")) for a, b in (pair, pair[::-1])},
    "rounding": {"floor": "ceil", "ceil": "floor", "FloorDivide": "CeilDivide", "CeilDivide": "FloorDivide"},
}
# Calls of which one argument remains: a mask is dropped, a value is not rounded.
MASKS = ("IfThenElse", "IfThenElseZero", "IfThenZeroElse", "where")  # the second argument remains
ROUNDINGS = re.compile(r"(?i:\w*(round|floor|ceil)\w*|trunc|nearbyint|nearestint|rint|f?abs)")
COMMUTATIVE = {"min", "max", "Min", "Max", "fmin", "fmax", "minimum", "maximum", "Add", "Mul", "MulAdd", "NegMulAdd",
               "MulSub", "And", "Or", "Eq", "Ne"}

LEVELS = {operator: level for level, operators in enumerate((
    "||", "&&", "|", "^", "&", "== !=", "< > <= >= <=>", "<< >>", "+ -", "* / %")) for operator in operators.split()}
BOUNDED = ("<", "<=", ">", ">=")
CLOSERS = {"(": ")", "[": "]", "{": "}", "<": ">"}
CPP_TOKEN = re.compile(r"""
    (?P<skip>//(?:[^\n\\]|\\.)*|/\*.*?\*/|^[ \t]*\#(?:[^\n\\]|\\.)*)
  | (?P<string>(?:u8|[uUL])?(?:R"(?P<mark>[^()\s\\]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
  | (?P<number>\.?\d(?:[eEpP][+-]|'?[\w.])*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<op>(?<=\s)(?:>>=?|>=)(?=\s)|<=>|<<=?|->|\.\.\.|::|&&|\|\||\+\+|--|[-+*/%&|^=!<]=|[^\s\w])
""", re.S | re.M | re.X)
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "|=", "&=", "^=", "<<=", ">>="}
DECLARATIONS = {"auto", "class", "const", "constexpr", "enum", "explicit", "extern", "friend", "inline", "mutable",
                "namespace", "static", "struct", "template", "typedef", "typename", "union", "using", "virtual"}
NO_EXPRESSION = {"return", "if", "for", "while", "switch", "do", "case", "default", "else", "goto", "delete", "new",
                 "public", "private", "protected", "operator"} | DECLARATIONS
MACRO = re.compile(r"[A-Z][A-Z0-9_]{2,}")
UNCHANGED_CALLS = {"static_assert", "assert", "decltype", "sizeof", "alignas", "alignof", "requires"}
TAG = re.compile(r"d[a-z0-9_]{0,3}")  # Highway's descriptors, of which no expression is made


def changed_integer(text):
    """The neighbours of an integer literal, of a floating one its double."""
    if match := re.fullmatch(r"(\d+)([uUlL]*)", text.replace("'", "")):
        value = int(match.group(1))
        yield "increase", f"{value + 1}{match.group(2)}"
        if value:
            yield "decrease", f"{value - 1}{match.group(2)}"
    elif re.fullmatch(r"\d*\.\d*f?", text) and float(text.rstrip("f")):
        yield "increase", f"(2 * {text})"


class CppFile:
    """The tokens of a C++ file with their brackets matched."""

    def __init__(self, text):
        self.text = text
        self.tokens = [Token(match.lastgroup if match.lastgroup != "mark" else "string", match.group(), *match.span())
                       for match in CPP_TOKEN.finditer(text) if not match.group("skip")]
        self.partner, self.enclosing, stack = {}, [], []
        for i, token in enumerate(self.tokens):
            self.enclosing.append(stack[-1] if stack else -1)
            if token.kind != "op":
                continue
            angle = token.text in "<>" and not self.binary(i)
            if token.text in "([{" or (angle and token.text == "<"):
                stack.append(i)
            elif token.text in ")]}" or (angle and stack and self.at(stack[-1]) == "<"):
                while stack and CLOSERS[self.at(stack[-1])] != token.text:
                    stack.pop()
                if stack:
                    self.partner[i], self.partner[stack[-1]] = stack[-1], i
                    stack.pop()
        self.skipped = self._skipped()

    def at(self, i):
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def binary(self, i):
        """An operator between two operands: spaces surround it, and the token before it ends an operand."""
        token = self.tokens[i]
        return (token.kind == "op" and 0 < i < len(self.tokens) - 1 and self.text[token.begin - 1].isspace()
                and self.text[token.end:token.end + 1].isspace()
                and self.at(i - 1) not in ("operator", "template", "return", ",", "(", "="))

    def opens(self, i):
        return i in self.partner and self.partner[i] > i

    def closes(self, i):
        return i in self.partner and self.partner[i] < i

    def _skipped(self):
        """True for tokens left unchanged: in template heads, aliases, arguments of macros and static assertions."""
        skipped, i = [False] * len(self.tokens), 0
        while i < len(self.tokens):
            end, name = i, self.at(i)
            if name in ("using", "typedef", "namespace", "friend"):
                while end < len(self.tokens) - 1 and self.at(end) not in (";", "{"):
                    end += 1
            elif name == "operator":
                end = i + (3 if self.at(i + 1) in ("(", "[") else 2)
            elif self.opens(i + 1) and ((name == "template" and self.at(i + 1) == "<") or (
                    self.at(i + 1) == "(" and (name in UNCHANGED_CALLS or MACRO.fullmatch(name)))):
                end = self.partner[i + 1]
            if end > i:
                skipped[i:end] = [True] * (end - i)
            i = max(end, i + 1)
        return skipped

    def source(self, begin, end):
        """The text of tokens [begin, end)."""
        return self.text[self.tokens[begin].begin:self.tokens[end - 1].end] if begin < end else ""

    def level(self, i):
        """The precedence of an operator; -1 for tokens that end every expression, None for tokens inside an operand."""
        text = self.at(i)
        if text in ASSIGNMENTS or text in ("", ",", ";", "?", ":", "return", "throw", "case", "{", "}"):
            return -1
        return LEVELS.get(text) if self.tokens[i].kind == "op" and self.binary(i) and i not in self.partner else None

    def operand_end(self, i, level):
        """The token after the operand that begins at i, whose operator has this level."""
        while i < len(self.tokens) and not self.closes(i):
            if (own := self.level(i)) is not None and own <= level and not (self.at(i) == "{" and self.opens(i)):
                break
            i = self.partner[i] + 1 if self.opens(i) else i + 1
        return i

    def operand_begin(self, i, level):
        """The first token of the operand that ends before i."""
        while i > 0 and not self.opens(i - 1):
            if (own := self.level(i - 1)) is not None and own <= level:
                break
            i = self.partner[i - 1] if self.closes(i - 1) else i - 1
        return i

    def arguments(self, opening):
        """The token ranges between commas in a bracket."""
        begin, ranges = opening + 1, []
        end = self.partner[opening]
        i = begin
        while i < end:
            if self.at(i) == ",":
                ranges.append((begin, i))
                begin = i + 1
            i = self.partner[i] + 1 if self.opens(i) else i + 1
        return [*ranges, (begin, end)] if begin < end else ranges

    def declares(self, begin, end):
        """A type and a name side by side, which no expression has."""
        i, last = begin, ""
        while i < end:
            kind = self.tokens[i].kind
            if self.at(i) in DECLARATIONS or (kind == "name" and last == "name"):
                return True
            if self.at(i) in ("*", "&", "&&") and not self.binary(i) and last == "name":
                return True
            if self.opens(i):
                last = "name" if self.at(i) == "<" else ""
                i = self.partner[i] + 1
                continue
            last, i = kind, i + 1
        return False

    def form(self, begin, end):
        """The kind of the argument in tokens begin to end."""
        first = self.tokens[begin]
        return first.text if first.kind == "op" else first.kind, any(self.at(k) == "(" for k in range(begin, end))

    def expression(self, edit):
        """The token range of the whole expression around an edit, up to brackets, commas and assignments."""
        begin = bisect.bisect_right(self.tokens, edit.begin, key=lambda token: token.end)
        end = bisect.bisect_left(self.tokens, edit.end, key=lambda token: token.begin)
        assigns = self.at(begin) in ASSIGNMENTS  # whose right side has the lowest precedence
        if edit.rule == "arguments":  # the call with the arguments
            begin = self.enclosing[begin]
            end = self.partner[begin] + 1
        elif edit.rule == "branches":
            begin -= 1
        while begin > 0 and not self.opens(begin - 1) and self.level(begin - 1) != -1 and not (
                self.begins_statement(begin)):
            begin = self.partner[begin - 1] if self.closes(begin - 1) else begin - 1
        while end < len(self.tokens) and not self.closes(end) and (self.opens(end) or not (
                self.at(end) in (",", ";") if assigns else self.level(end) == -1)):
            end = self.partner[end] + 1 if self.opens(end) else end + 1
        return begin, end

    def choice(self, edit, call):
        """(begin, end, before, after): the text around [begin, end) with which `call` chooses, or None."""
        if edit.rule == "statement":
            return edit.begin, edit.end, f"if ({call}) {{}} else ", ""
        first, last = self.expression(edit)
        begin, end = self.tokens[first].begin, self.tokens[last - 1].end
        mutant = self.text[begin:edit.begin] + edit.new + self.text[edit.end:end]
        if any(match["skip"] and match["skip"].lstrip()[0] == "#" for match in CPP_TOKEN.finditer(mutant)):
            return None
        # On one line, without comments.
        mutant = re.sub(r"\s*\n\s*", " ", CPP_TOKEN.sub(lambda match: "" if match["skip"] else match[0], mutant))
        return begin, end, f"({call} ? ({mutant}) : (", "))"

    # The rules.

    def edits(self):
        for i, token in enumerate(self.tokens):
            if self.skipped[i]:
                continue
            if token.kind == "op":
                yield from self.of_operator(i)
            elif token.kind == "number":
                if not self.inside(i, "<"):
                    yield from (Edit(rule, token.begin, token.end, new) for rule, new in changed_integer(token.text))
            elif token.kind == "name":
                if token.text in ("true", "false"):
                    yield Edit("constant", token.begin, token.end, "false" if token.text == "true" else "true")
                elif token.text == "if":
                    yield from self.of_condition(i)
                elif self.at(i + 1) == "(" and self.opens(i + 1) and token.text not in NO_EXPRESSION:
                    yield from self.of_call(i, i + 1)
                elif self.at(i + 1) == "<" and self.opens(i + 1) and self.at(self.partner[i + 1] + 1) == "(" and (
                        self.opens(self.partner[i + 1] + 1)):
                    yield from self.of_call(i, self.partner[i + 1] + 1)
            yield from self.of_statement(i)

    def inside(self, i, opening):
        """Returns whether the innermost bracket around a token is this one."""
        return self.at(self.enclosing[i]) == opening and self.opens(self.enclosing[i])

    def of_operator(self, i):
        token = self.tokens[i]
        if token.text == "!" and not self.text[token.end].isspace():
            yield Edit("negate", token.begin, token.end, "")
        if not self.binary(i) or i in self.partner:
            return
        if token.text == "?":
            yield from self.of_branches(i)
        near_string = "string" in (self.tokens[i - 1].kind, self.tokens[i + 1].kind)
        for rule, mistaken in OPERATORS.items():
            if token.text in mistaken and not near_string:
                yield Edit(rule, token.begin, token.end, mistaken[token.text])
        if token.text in BOUNDED and not near_string and self.at(i + 1) not in ("nullptr", "true", "false", "{"):
            yield Edit("bound_up", token.begin, token.end, f"{token.text} 1 +")
            yield Edit("bound_down", token.begin, token.end, f"{token.text} -1 +")
        if token.text in ("+", "-", "*", "/", "&&", "||"):
            level = LEVELS[token.text]
            end = self.operand_end(i + 1, level)
            yield Edit("term", self.tokens[i - 1].end, self.tokens[end - 1].end, "")
            begin = self.operand_begin(i, level)
            if token.text != "/" and self.level(begin - 1) != level and begin < i:
                to = self.tokens[i + 1].begin if token.text != "-" else token.begin
                yield Edit("term", self.tokens[begin].begin, to, "")

    def of_branches(self, i):
        """The two results of a conditional expression, exchanged."""
        k, depth = i + 1, 0
        while k < len(self.tokens) and not self.closes(k) and (self.at(k) != ":" or depth) and self.at(k) != ";":
            depth += (self.at(k) == "?") - (self.at(k) == ":")
            k = self.partner[k] + 1 if self.opens(k) else k + 1
        if self.at(k) != ":":
            return
        end = k + 1
        while end < len(self.tokens) and not self.closes(end) and self.at(end) not in (",", ";"):
            end = self.partner[end] + 1 if self.opens(end) else end + 1
        yes, no = self.source(i + 1, k), self.source(k + 1, end)
        if yes and no and yes != no:
            between = self.text[self.tokens[k - 1].end:self.tokens[k + 1].begin]
            yield Edit("branches", self.tokens[i + 1].begin, self.tokens[end - 1].end, no + between + yes)

    def of_condition(self, i):
        opening = i + 1 + (self.at(i + 1) == "constexpr")
        if not self.opens(opening) or any(self.at(k) in (";", "=") for k in range(opening, self.partner[opening])):
            return
        begin, end = self.tokens[opening].end, self.tokens[self.partner[opening]].begin
        yield Edit("negate", begin, end, f"!({self.text[begin:end]})")

    def of_call(self, i, opening):
        name, arguments = self.at(i), self.arguments(opening)
        if any(self.declares(*argument) for argument in arguments) or (
                self.tokens[i - 1].kind == "name" and self.at(i - 1) not in ("return", "throw", "else", "case")):
            return
        begin = i
        while self.at(begin - 1) == "::" and self.tokens[begin - 2].kind == "name":
            begin -= 2
        token = self.tokens[i]
        for rule, mistaken in NAMES.items():
            if name in mistaken:
                yield Edit(rule, token.begin, token.end, mistaken[name])
        values = [part for part in arguments if not TAG.fullmatch(self.source(*part))]
        remaining = values[:1] if ROUNDINGS.fullmatch(name) else values[1:2] if name in MASKS else ()
        for part in remaining:
            rule, end = "mask" if name in MASKS else "rounding", self.tokens[self.partner[opening]].end
            yield Edit(rule, self.tokens[begin].begin, end, f"({self.source(*part)})")
        for k, (a, b) in enumerate(zip(arguments, arguments[1:], strict=False)):
            one, other = self.source(*a), self.source(*b)
            # Only arguments that look alike are exchanged, as most others differ in type.
            if one == other or self.form(*a) != self.form(*b) or "{" in one or TAG.fullmatch(one):
                continue
            if k == 0 and name in COMMUTATIVE:
                continue
            between = self.text[self.tokens[a[1] - 1].end:self.tokens[b[0]].begin]
            yield Edit("arguments", self.tokens[a[0]].begin, self.tokens[b[1] - 1].end, other + between + one)

    def begins_statement(self, i):
        before = self.at(i - 1)
        if before in (";", "{", "}", "else", "do"):
            return True
        if before == ":":
            k = i - 2
            while k > 0 and self.at(k) not in (";", "{", "}", "case", "?", "default"):
                k -= 1
            return self.at(k) in ("case", "default")
        if before != ")" or i - 1 not in self.partner:
            return False
        k = self.partner[i - 1] - 1
        return self.at(k - (self.at(k) == "constexpr")) in ("if", "for", "while")

    def of_statement(self, i):
        """A statement without which its function compiles: a call, an assignment, a jump."""
        token = self.tokens[i]
        if token.kind != "name" and token.text not in ("*", "++", "--"):
            return
        if token.text in NO_EXPRESSION or MACRO.fullmatch(token.text):
            return
        if self.inside(i, "(") or not self.begins_statement(i):
            return
        end, acts = i, token.text in ("++", "--", "throw", "continue", "break")
        while end < len(self.tokens) and self.at(end) != ";":
            if self.closes(end) or self.at(end) == "{" or (end > i and self.at(end) in (":", "else")):
                return
            before = self.tokens[end - 1]
            if not acts and self.tokens[end].kind == "name" and end > i + (token.text == "*") and (
                    before.kind == "name" or before.text in (">", "*", "&", "&&")):
                return  # a declaration of a variable
            if self.at(end) == "(" and self.opens(end) and any(self.declares(*part) for part in self.arguments(end)):
                return  # declares a constructor
            acts = acts or self.at(end) in ASSIGNMENTS or self.at(end) in ("(", "++", "--")
            end = self.partner[end] + 1 if self.opens(end) else end + 1
        if acts:
            yield Edit("statement", token.begin, self.tokens[end - 1].end, "")


class PythonFile(ast.NodeVisitor):
    """The candidates of a Python file: ast finds what is changed, and operators are tokens between two operands."""

    SYMBOLS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
               ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*",
               ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.BitAnd: "&", ast.BitOr: "|", ast.And: "and",
               ast.Or: "or"}
    ROUNDED_METHODS = {"round", "clamp", "float", "to", "contiguous", "clone", "detach", "masked_fill", "abs"}

    def __init__(self, text):
        self.text, self.found = text, []
        self.lines = [0]
        for line in text.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.tokens = [(self.lines[t.start[0] - 1] + t.start[1], self.lines[t.end[0] - 1] + t.end[1], t.string)
                       for t in tokenize.generate_tokens(io.StringIO(text).readline)
                       if t.type in (tokenize.OP, tokenize.NAME)]

    def edits(self):
        self.visit(ast.parse(self.text))
        return self.found

    def choice(self, edit, call):
        """Returns what CppFile.choice() does, for the smallest expression around an edit."""
        if edit.rule == "statement":
            place = edit.begin, edit.end, f"if not {call}: ", ""
        else:
            spans, nodes = [], [ast.parse(self.text)]
            for node in nodes:  # a list that grows
                if isinstance(node, ast.expr) and not isinstance(node, (ast.Slice, ast.Starred, ast.JoinedStr)):
                    spans.append(self.span(node))
                nodes += [] if isinstance(node, ast.JoinedStr) else ast.iter_child_nodes(node)
            begin, end = min(((a, b) for a, b in spans if a <= edit.begin and edit.end <= b), key=lambda s: s[1] - s[0])
            mutant = self.text[begin:edit.begin] + edit.new + self.text[edit.end:end]
            place = begin, end, f"(({mutant}) if {call} else (", "))"
        try:
            ast.parse(planted(self.text, [place]))
        except SyntaxError:
            return None
        return place

    def span(self, node):
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def source(self, node):
        return self.text[slice(*self.span(node))]

    def operand(self, node, parent):
        """The span of a part with the brackets around it alone."""
        (begin, end), limits = self.span(node), self.span(parent)
        while True:
            k = bisect.bisect_left(self.tokens, (begin,)) - 1
            n = bisect.bisect_left(self.tokens, (end,))
            if not (0 <= k and n < len(self.tokens) and self.tokens[k][2] == "(" and self.tokens[n][2] == ")"
                    and limits[0] <= self.tokens[k][0] and self.tokens[n][1] <= limits[1]):
                return begin, end
            begin, end = self.tokens[k][0], self.tokens[n][1]

    def exchange(self, rule, a, b):
        """Two spans exchanged."""
        one, other = self.text[slice(*a)], self.text[slice(*b)]
        if one != other:
            self.add(rule, a[0], b[1], other + self.text[a[1]:b[0]] + one)

    def add(self, rule, begin, end, new):
        self.found.append(Edit(rule, begin, end, new))

    def operator(self, left, right, symbol):
        """The span of an operator between two nodes."""
        begin, end, words = self.span(left)[1], self.span(right)[0], symbol.split()
        k = bisect.bisect_left(self.tokens, (begin,))
        while self.tokens[k][2] != words[0] and self.tokens[k][0] < end:
            k += 1
        return self.tokens[k][0], self.tokens[k + len(words) - 1][1]

    def of_operator(self, left, right, node, operator):
        symbol = self.SYMBOLS.get(type(operator))
        if symbol is None or (symbol in "+*%" and any(isinstance(side, (ast.JoinedStr, ast.List)) or isinstance(
                getattr(side, "value", None), str) for side in (left, right))):
            return
        begin, end = self.operator(left, right, symbol)
        for rule, mistaken in OPERATORS.items():
            if symbol in mistaken:
                self.add(rule, begin, end, mistaken[symbol])
        if symbol in BOUNDED:
            self.add("bound_up", begin, end, f"{symbol} 1 +")
            self.add("bound_down", begin, end, f"{symbol} -1 +")
        if isinstance(node, (ast.BinOp, ast.BoolOp)) and symbol != "%":
            # One operand alone.
            (begin, to), (start, end) = self.operand(left, node), self.operand(right, node)
            self.add("term", to, end, "")
            if isinstance(node, ast.BoolOp) or not isinstance(left, ast.BinOp):
                self.add("term", begin, start, "")

    def visit_Compare(self, node):
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self.of_operator(left, right, node, operator)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        self.of_operator(node.left, node.right, node, node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.of_operator(left, right, node, node.op)
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            self.add("negate", self.span(node)[0], self.span(node.operand)[0], self.text[
                self.span(node)[0] + 3:self.span(node.operand)[0]].lstrip())
        self.generic_visit(node)

    def visit_If(self, node):
        if self.source(node.test).endswith("TYPE_CHECKING"):
            return
        self.add("negate", *self.span(node.test), f"not ({self.source(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node):
        self.exchange("branches", self.operand(node.body, node), self.operand(node.orelse, node))
        self.generic_visit(node)

    def visit_Call(self, node):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        name_end = self.span(function)[1]
        for rule, mistaken in NAMES.items():
            if name in mistaken:
                self.add(rule, name_end - len(name), name_end, mistaken[name])
        begin, end = self.span(node)
        if name in MASKS and len(node.args) > 1:
            self.add("mask", begin, end, f"({self.source(node.args[1])})")
        if isinstance(function, ast.Attribute) and name in self.ROUNDED_METHODS:
            self.add("rounding", begin, end, f"({self.source(function.value)})")
        elif name in ("round", "abs", "int") and len(node.args) == 1:
            self.add("rounding", begin, end, f"({self.source(node.args[0])})")
        for k, (a, b) in enumerate(zip(node.args, node.args[1:], strict=False)):
            if not (k == 0 and name in COMMUTATIVE) and name not in ("isinstance", "getattr", "hasattr"):
                self.exchange("arguments", self.operand(a, node), self.operand(b, node))
        # A keyword is dropped, with the comma that follows it.
        for keyword in node.keywords:
            begin, end = self.span(keyword)
            self.add("keyword", begin, end + len(re.match(r"\s*,?[ \t]*", self.text[end:]).group()), "")
        self.generic_visit(node)

    def visit_Constant(self, node):
        begin, end = self.span(node)
        if isinstance(node.value, bool):
            self.add("constant", begin, end, str(not node.value))
        elif isinstance(node.value, (int, float)):
            for rule, new in changed_integer(self.text[begin:end]):
                self.add(rule, begin, end, new)

    def of_statement(self, node):
        self.add("statement", *self.span(node), "pass")
        self.generic_visit(node)

    visit_Raise = visit_AugAssign = visit_Continue = visit_Break = of_statement

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call):
            self.add("statement", *self.span(node), "pass")
        self.generic_visit(node)

    def visit_Assign(self, node):
        if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self.add("statement", *self.span(node), "pass")
        self.generic_visit(node)

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)

    def visit_FunctionDef(self, node):
        for part in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(part)  # neither annotations nor decorators

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_JoinedStr(self, node):
        """Positions inside of it are not those of the file before Python 3.12."""


def parsed(path, text):
    return (PythonFile if path.endswith(".py") else CppFile)(text)


def edits(path, text):
    """Every candidate of a file, in order; one per rule and place, none that changes nothing."""
    found = {}
    for edit in parsed(path, text).edits():
        if text[edit.begin:edit.end] != edit.new:
            found.setdefault((edit.begin, edit.rule), edit)
    return [found[key] for key in sorted(found)]


def planted(text, choices):
    """The text with every choice in it, those nested in another one being part of what that leaves unchanged."""
    pieces = []
    for k, (begin, end, before, after) in enumerate(sorted(choices, key=lambda choice: (choice[0], -choice[1]))):
        pieces += [(begin, 1, k, before), (end, 0, -k, after)]
    parts, at = [], 0
    for offset, _, _, piece in sorted(pieces):
        parts += [text[at:offset], piece]
        at = offset
    return "".join(parts) + text[at:]
