import Foundation

/// A call of a function that a model wrote in JSON between `<tool_call>` and `</tool_call>`.
public struct FunctionCall: Equatable, Sendable {
    /// The function's name.
    public let name: String
    /// The arguments as the model wrote them: an object in JSON.
    public let arguments: String

    /// Return what of an answer is text, without white space around calls, and its calls in order.
    ///
    /// A call is an object with a `name` and with `arguments` (or `parameters`), an object. A call that is cut off, or
    /// stands in another form, is text. Nobody has checked that there is a function of this name.
    public static func read(_ answer: String) -> (text: String, calls: [FunctionCall]) {
        var splitter = CallSplitter()
        var (text, space, calls) = ([Unicode.Scalar](), [Unicode.Scalar](), [FunctionCall]())
        var follows = false  // whether the last piece was a call
        for piece in splitter.push(answer, ended: true) {
            guard case .text(let more) = piece else {
                if case .call(let raw) = piece { calls += CallSplitter.calls(raw) }
                (space, follows) = ([], true)
                continue
            }
            let passed = space + more.unicodeScalars
            let last = passed.lastIndex { !isSpace($0) }.map { $0 + 1 } ?? 0
            if last > 0 {
                text += follows ? passed[..<last].drop(while: isSpace) : passed[..<last]
                follows = false
            }
            space = Array(passed[last...])
        }
        return (String(String.UnicodeScalarView(calls.isEmpty ? text + space : text)), calls)
    }

    /// Read an object; nil if it is no call.
    fileprivate init?(_ object: ObjectText) {
        var members = object.members
        if let inner = members["function"].flatMap({ ObjectText($0, from: 0) }) { members = inner.members }
        guard let name = members["name"] ?? members["function"], let decoded = Self.json(name) as? String, !decoded.isEmpty else { return nil }
        let given = members["arguments"] ?? members["parameters"] ?? Array("{}".unicodeScalars)
        guard object.json is [String: Any] else { return nil }
        switch Self.json(given) {
        case is [String: Any]: arguments = string(given)
        case is NSNull: arguments = "{}"
        case let text as String:
            guard Self.json(Array(text.unicodeScalars)) is [String: Any] else { return nil }
            arguments = text
        default: return nil
        }
        self.name = decoded
    }

    fileprivate static func json(_ text: [Unicode.Scalar]) -> Any? {
        try? JSONSerialization.jsonObject(with: Data(string(text).utf8), options: .fragmentsAllowed)
    }
}

/// Splits an answer into the calls in `<tool_call>` marks and the rest. However it is cut, the pieces' texts are equal.
struct CallSplitter {
    private static let begin = Array("<tool_call>".unicodeScalars)
    private static let end = Array("</tool_call>".unicodeScalars)
    private static let between = Set(" \t\r\n,[]".unicodeScalars)  // what may stand between a mark and a call
    private var text: [Unicode.Scalar] = []
    private var waits = false  // whether the text begins with a mark and an object, which may not have ended

    /// Return what became certain with the next text.
    mutating func push(_ next: String, ended: Bool) -> [AnswerPiece] {
        text += next.unicodeScalars
        if waits && !ended && !next.unicodeScalars.contains(where: { $0 == "}" || $0 == ">" }) { return [] }
        waits = false
        var pieces: [AnswerPiece] = []
        func pass(_ count: Int, _ kind: (String) -> AnswerPiece) {
            if count > 0 { pieces.append(kind(string(Array(text[..<count])))) }
            text.removeFirst(count)
        }
        while true {
            let found = first(of: [Self.begin], in: text)
            pass(found ?? text.count - (ended ? 0 : begun([Self.begin], at: text)), AnswerPiece.text)
            if found == nil { return pieces }
            guard let block = Self.block(text, ended) else {
                waits = text.dropFirst(Self.begin.count).first { !Self.between.contains($0) } == "{"
                return pieces
            }
            pass(block.end, AnswerPiece.call)
            pass(block.rest, AnswerPiece.text)
        }
    }

    /// Return the calls of a text that begins with a mark.
    static func calls(_ raw: String) -> [FunctionCall] { block(Array(raw.unicodeScalars), true)?.calls ?? [] }

    /// What a text begins with after a mark: calls, which end at `end`, then scalars in which no mark is looked for.
    private typealias Block = (calls: [FunctionCall], end: Int, rest: Int)

    /// Read a text that begins with a mark; nil if more text tells.
    private static func block(_ text: [Unicode.Scalar], _ ended: Bool) -> Block? {
        var (at, last, calls) = (begin.count, 0, [FunctionCall]())
        while true {
            at = text[at...].firstIndex { !between.contains($0) } ?? text.count
            let next = text[at...]
            if next.first == "{" {
                let object = ObjectText(text, from: at)
                if object == nil && !ended { return nil }
                guard let object, let call = FunctionCall(object) else {
                    return (calls, last, (object?.end ?? text.count) - last)
                }
                calls.append(call)
                (at, last) = (object.end, object.end)
            } else if calls.isEmpty && !next.isEmpty {
                return ([], 0, begin.count)
            } else if next.starts(with: end) {
                return (calls, at + end.count, 0)
            } else if end.starts(with: next) {
                return !ended ? nil : calls.isEmpty ? ([], 0, begin.count) : (calls, text.count, 0)
            } else {
                return (calls, at, 0)
            }
        }
    }
}

/// The text of an object in JSON, with line breaks in strings as JSON has them.
private struct ObjectText {
    /// Where it ends.
    let end: Int
    /// The text of each value, by key; of a key that stands twice the last one.
    let members: [String: [Unicode.Scalar]]
    private let text: [Unicode.Scalar]

    /// Find the end of the object that begins at a place; nil if it does not end, or none begins.
    init?(_ given: [Unicode.Scalar], from start: Int) {
        guard given[start...].first == "{" else { return nil }
        var (depth, quoted, escaped) = (0, false, false)
        var (text, members) = ([Unicode.Scalar](), [String: [Unicode.Scalar]]())
        var (key, begins) = (String?.none, 1)  // the key whose value is being read, and where that begins
        for (place, scalar) in given[start...].enumerated() {
            text += quoted && scalar.value < 0x20 ? Array(Self.escape(scalar).unicodeScalars) : [scalar]
            if escaped {
                escaped = false
            } else if quoted {
                (escaped, quoted) = (scalar == "\\", scalar != "\"")
            } else {
                let isEnd = scalar == "}" || scalar == "]"
                if depth == 1, scalar == ":", key == nil {
                    key = FunctionCall.json(Array(text[begins..<text.count - 1])) as? String
                    begins = text.count
                } else if depth == 1, scalar == "," || isEnd {
                    if let key { members[key] = Array(text[begins..<text.count - 1]) }
                    (key, begins) = (nil, text.count)
                }
                quoted = scalar == "\""
                depth += scalar == "{" || scalar == "[" ? 1 : isEnd ? -1 : 0
                if depth <= 0 {
                    (end, self.members, self.text) = (start + place + 1, members.mapValues(Self.trimmed), text)
                    return
                }
            }
        }
        return nil
    }

    /// What it says; nil if it is no JSON.
    var json: Any? { FunctionCall.json(text) }

    private static func trimmed(_ text: [Unicode.Scalar]) -> [Unicode.Scalar] {
        let last = text.lastIndex { !isSpace($0) }.map { $0 + 1 } ?? 0
        return Array(text[..<last].drop(while: isSpace))
    }

    private static func escape(_ scalar: Unicode.Scalar) -> String {
        switch scalar {
        case "\n": "\\n"
        case "\r": "\\r"
        case "\t": "\\t"
        default: "\\u00" + (scalar.value < 16 ? "0" : "") + String(scalar.value, radix: 16)
        }
    }
}
