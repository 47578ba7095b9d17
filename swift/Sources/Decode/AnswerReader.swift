/// What of an answer a piece of its text is.
public enum AnswerPiece: Equatable, Sendable {
    /// What the model thinks before its answer.
    case thought(String)
    /// The answer.
    case text(String)
    /// A call of a function, as the model wrote it: in `<tool_call>` marks, where `FunctionCall.read` reads it, or the
    /// arguments of one in harmony's channels.
    case call(String)
}

/// Splits an answer into its thought and what follows it. However the answer is cut into pieces, both are equal.
///
/// White space around a thought is left out. An answer that does not begin with a thought has none: marks further on
/// are text.
package struct AnswerReader {
    private typealias Text = [Unicode.Scalar]

    private enum Place { case before, begun, inside, gap, after }

    private let begin, end: Text
    private var place: Place
    private var text: Text = []
    private var space: Text = []  // white space that belongs to what follows it, if anything does
    private var channels: Channels?
    private var calls = CallSplitter()

    /// - Parameters:
    ///   - format: how the model marks thoughts.
    ///   - opened: whether the prompt has opened the thought.
    package init(_ format: ChatFormat?, opened: Bool) {
        begin = Array((format?.thoughts?.begin ?? "").unicodeScalars)
        end = Array((format?.thoughts?.end ?? "").unicodeScalars)
        place = end.isEmpty ? .after : opened ? .begun : .before
        channels = format?.channels == true ? Channels() : nil
    }

    /// Return what became certain with the answer's next text.
    ///
    /// - Parameters:
    ///   - next: the next text.
    ///   - ended: whether the answer ends with it.
    package mutating func push(_ next: String, ended: Bool = false) -> [AnswerPiece] {
        text += next.unicodeScalars
        var pieces: [AnswerPiece] = []
        if place == .before { leaveOut(ended) }
        if place == .begun || place == .inside, let thought = thought(ended) { pieces.append(.thought(thought)) }
        if place == .gap {
            text = Array(text.drop(while: isSpace))
            if !text.isEmpty { place = .after }
        }
        guard place == .after else { return pieces }
        let rest = string(text)
        text = []
        if channels != nil { return pieces + channels!.push(rest, ended: ended) }
        return pieces + calls.push(rest, ended: ended)
    }

    /// Look for the mark with which a thought begins.
    private mutating func leaveOut(_ ended: Bool) {
        let shown = Array(text.drop(while: isSpace))
        space += text.prefix(text.count - shown.count)
        text = shown
        if shown.starts(with: begin) {
            (place, text, space) = (.begun, Array(shown.dropFirst(begin.count)), [])
        } else if ended || !begin.starts(with: shown) {
            (place, text, space) = (.after, space + shown, [])
        }
    }

    /// Return what became certain of the thought; nil if nothing did. White space at its end waits for the next text.
    private mutating func thought(_ ended: Bool) -> String? {
        if place == .begun { text = Array(text.drop(while: isSpace)) }
        let found = first(of: [end], in: text)
        let at = found ?? text.count - (ended ? 0 : begun([end], at: text))
        let last = text[..<at].lastIndex { !isSpace($0) }.map { $0 + 1 } ?? 0
        let thought = last > 0 ? space + text[..<last] : []
        if last > 0 { space = [] }
        if found != nil {
            (place, text) = (.gap, Array(text[(at + end.count)...]))
        } else {
            space += text[last..<at]
            if !thought.isEmpty { place = .inside }
            text = Array(text[at...])
        }
        return thought.isEmpty ? nil : string(thought)
    }
}

/// Harmony's channels: messages, each with a header that names its channel, and a function if it calls one.
private struct Channels {
    private static let message = Array("<|message|>".unicodeScalars)
    private static let ends = ["<|end|>", "<|call|>", "<|return|>", "<|start|>"].map { Array($0.unicodeScalars) }

    private enum Body { case thought, text, call }

    private var body: Body?  // nil in a header
    private var header: [Unicode.Scalar] = []
    private var text: [Unicode.Scalar] = []
    private var space: [Unicode.Scalar] = []  // white space of an answer that is told only if text follows
    private var called = false  // whether an answer has had a call, and whether the last message was one
    private var follows = false

    mutating func push(_ next: String, ended: Bool) -> [AnswerPiece] {
        text += next.unicodeScalars
        var pieces: [AnswerPiece] = []
        while true {
            let marks = body == nil ? [Self.message] : Self.ends
            let found = first(of: marks, in: text)
            let at = found ?? text.count - (ended ? 0 : begun(marks, at: text))
            let passed = Array(text[..<at])
            text = Array(text[at...])
            if let body { tell(passed, of: body, &pieces) } else { header += passed }
            guard found != nil else { break }
            if body == nil {
                text.removeFirst(Self.message.count)
                body = Self.body(string(header))
                if body == .call { (space, called, follows) = ([], true, true) }
                header = []
            } else {
                body = nil
            }
        }
        if ended && !header.isEmpty && body == nil && !string(header).contains("<|") {
            tell(header, of: .text, &pieces)  // not harmony at all
        }
        if ended && !space.isEmpty && !called { pieces.append(.text(string(space))) }
        if ended { space = [] }
        return pieces
    }

    private static func body(_ header: String) -> Body {
        header.contains("to=") ? .call : header.contains("analysis") ? .thought : .text
    }

    private mutating func tell(_ passed: [Unicode.Scalar], of body: Body, _ pieces: inout [AnswerPiece]) {
        if passed.isEmpty { return }
        switch body {
        case .thought: pieces.append(.thought(string(passed)))
        case .call: pieces.append(.call(string(passed)))
        case .text:
            let last = passed.lastIndex { !isSpace($0) }.map { $0 + 1 } ?? 0
            if last > 0 {
                let shown = space + passed[..<last]
                pieces.append(.text(string(follows ? Array(shown.drop(while: isSpace)) : shown)))
                (space, follows) = ([], false)
            }
            space += passed[last...]
        }
    }
}

func string(_ scalars: [Unicode.Scalar]) -> String { String(String.UnicodeScalarView(scalars)) }

/// Return the first place of any mark in a text.
func first(of marks: [[Unicode.Scalar]], in text: [Unicode.Scalar]) -> Int? {
    text.indices.first { at in marks.contains { text[at...].starts(with: $0) } }
}

/// Return the length of the longest end of a text that begins a mark.
func begun(_ marks: [[Unicode.Scalar]], at text: [Unicode.Scalar]) -> Int {
    let longest = min((marks.map(\.count).max() ?? 1) - 1, text.count)
    return stride(from: longest, to: 0, by: -1).first { length in
        marks.contains { $0.starts(with: text.suffix(length)) }
    } ?? 0
}
