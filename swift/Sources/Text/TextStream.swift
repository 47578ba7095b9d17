import ShardmillDecode

/// The text of a growing token sequence, and stop strings in it.
///
/// A token may end in the middle of a character, and a stop string in the middle of a token. So text is held back until
/// it can neither change nor begin a stop string. The cost of a token is bounded for a text of any length.
package struct TextStream {
    private static let unknown: Unicode.Scalar = "\u{FFFD}"  // written for bytes that are not, or not yet, a character
    /// At most this many at the end may become a character, which has up to four bytes.
    private static let unfinished = 3
    /// Tokens that are decoded again with each new one, at least; at most four times as many.
    private static let window = 8

    /// Text as a list of scalars: Swift's characters would join what later tokens add.
    private typealias Text = [Unicode.Scalar]

    private let decode: ([Int]) -> String
    private let stops: [Text]
    private var tokens: [Int]
    private var text: Text
    private var done: Int  // scalars of `text` that have been handed on
    private var whole: Int  // tokens of the window whose text has been handed on entirely
    private var begun: Int  // scalars at the end of the prompt that tokens may still complete
    private var held: Text = []  // final, but it may begin a stop string
    /// True once a stop string is complete.
    package private(set) var stopped = false

    /// - Parameters:
    ///   - decode: tokens -> text.
    ///   - stop: strings that end the text, before their first occurrence.
    ///   - prompt: the tokens before the text: some tokenizers write a space depending on the previous token.
    package init(stop: [String] = [], prompt: [Int] = [], decode: @escaping ([Int]) -> String) throws {
        if stop.contains("") { throw ShardmillError(.request, "an empty stop string would stop at once: leave it out") }
        self.decode = decode
        stops = stop.map { Array($0.unicodeScalars) }
        tokens = Self.seam(prompt, decode)
        text = tokens.isEmpty ? [] : Array(decode(tokens).unicodeScalars)
        done = text.count
        whole = tokens.count
        begun = Self.unfinished(text)
    }

    /// Append a token and return the text that became final.
    package mutating func push(_ token: Int) -> String {
        if stopped { return "" }
        tokens.append(token)
        let new = Array(decode(tokens).unicodeScalars)
        let same = zip(text[..<done], new).prefix { $0 == $1 }.count
        if same < done - begun {  // the tokenizer revises emitted text, which stays as emitted
            restart(Array(tokens[whole...]))
        } else {
            (text, done) = (new, same)
        }
        handOn()
        if tokens.count > 2 * Self.window { shorten() }
        return release()
    }

    /// Return the text that was held back, at the end of the request.
    package mutating func flush() -> String {
        if stopped { return "" }
        let rest = held + text[done...]
        held = []
        restart([])
        return String(String.UnicodeScalarView(rest))
    }

    private mutating func restart(_ tokens: [Int]) {
        self.tokens = tokens
        text = tokens.isEmpty ? [] : Array(decode(tokens).unicodeScalars)
        (done, whole, begun) = (0, 0, 0)
    }

    /// Append the text that no further token can change to the held text.
    private mutating func handOn() {
        let end = text.count - Self.unfinished(text)
        if end > done {
            held += text[done..<end]
            (done, begun) = (end, 0)
        }
        if done == text.count { whole = tokens.count }
    }

    /// Drop the window's first tokens, if the text of the others does not depend on them.
    private mutating func shorten() {
        let pending = text.count - done
        for count in Self.window...Self.window + Self.unfinished {
            let last = Array(tokens.suffix(count))
            let rest = Array(decode(last).unicodeScalars)
            let fits = pending <= rest.count && text.suffix(rest.count).elementsEqual(rest) && stays(rest, last)
            let gives = count == Self.window + Self.unfinished && tokens.count > 4 * Self.window
            if fits || gives {
                whole = max(0, whole - (tokens.count - count))
                (tokens, text, done) = (last, rest, max(0, rest.count - pending))
                return
            }
        }
    }

    /// Return whether the beginning of a text is final: no wrong bytes that only lack preceding tokens.
    private func stays(_ text: Text, _ tokens: [Int]) -> Bool {
        text.first != Self.unknown
            || (1...Self.unfinished + 1).allSatisfy {
                decode(Array(tokens.prefix($0))).unicodeScalars.first == Self.unknown
            }
    }

    private mutating func release() -> String {
        let found = stops.compactMap { Self.place(of: $0, in: held) }.min()
        stopped = found != nil
        let end = found ?? held.count - pendingStop()
        let out = held[..<end]
        held = Array(held[end...])
        return String(String.UnicodeScalarView(out))
    }

    /// Return the length of the longest end of the held text that begins a stop string.
    private func pendingStop() -> Int {
        let longest = min((stops.map(\.count).max() ?? 1) - 1, held.count)
        return stride(from: longest, to: 0, by: -1).first { length in
            stops.contains { $0.starts(with: held.suffix(length)) }
        } ?? 0
    }

    private static func place(of wanted: Text, in text: Text) -> Int? {
        if text.count < wanted.count { return nil }
        return (0...text.count - wanted.count).first { text[$0..<$0 + wanted.count].elementsEqual(wanted) }
    }

    /// Return how many scalars at the end of a text may still change.
    private static func unfinished(_ text: Text) -> Int {
        min(unfinished, text.reversed().prefix { $0 == unknown }.count)
    }

    /// Return the prompt's last tokens, starting at the beginning of a character if one can be found.
    private static func seam(_ prompt: [Int], _ decode: ([Int]) -> String) -> [Int] {
        for count in window...window + unfinished {
            let seam = Array(prompt.suffix(count))
            if seam.isEmpty || decode(seam).unicodeScalars.first != unknown { return seam }
        }
        return Array(prompt.suffix(window))
    }
}
