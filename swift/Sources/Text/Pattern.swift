import Foundation
import ShardmillDecode

/// What a Split or a Replace looks for.
enum Pattern: @unchecked Sendable {  // NSRegularExpression is immutable and safe to share
    case text(ArraySlice<UInt8>)
    case regex(NSRegularExpression)
    /// A pattern that needs no regular expression; all of a text consists of matches.
    case scanner(Scanner)

    init(_ json: JSON?) throws {
        if let text = json?["String"]?.bytes, !text.isEmpty {
            self = .text(text)
        } else if let regex = json?["Regex"]?.text {
            self = try .init(regex: regex)
        } else {
            throw ShardmillError(.tokenizer, "a pattern is neither a text nor a regular expression")
        }
    }

    /// Return what finds a regular expression: a scanner if there is one, and scanners are wanted.
    init(regex: String, scans: Bool = true) throws {
        if scans, let scanner = Scanner(pattern: regex) {
            self = .scanner(scanner)
        } else if regex.utf8.count <= 4000, let found = try? NSRegularExpression(pattern: regex) {
            self = .regex(found)
        } else {
            throw ShardmillError(.tokenizer, "the pattern '\(regex.prefix(80))' is not supported")
        }
    }

    struct Piece {
        let range: Range<Int>
        let matches: Bool
    }

    /// Divide a text into matches and what lies between them.
    ///
    /// - Throws: `ShardmillError` of kind `tokenizer` if a regular expression takes too many steps.
    func split(_ text: ArraySlice<UInt8>) throws -> [Piece] {
        switch self {
        case .text(let wanted): return pieces(of: wanted, in: text)
        case .scanner(let scanner):
            var found: [Piece] = []
            text.withUnsafeBufferPointer { bytes in
                var at = 0
                while at < bytes.count {
                    let end = scanner.end(bytes, at)
                    found.append(Piece(range: text.startIndex + at..<text.startIndex + end, matches: true))
                    at = end
                }
            }
            return found
        case .regex(let regex): return Pattern.divided(text, try matches(regex, text))
        }
    }

    /// Return a text with all matches replaced.
    func replace(_ text: ArraySlice<UInt8>, with content: ArraySlice<UInt8>) throws -> ArraySlice<UInt8> {
        if case .text(let wanted) = self { return replaced(wanted, in: text, with: content) }
        var found: [UInt8] = []
        found.reserveCapacity(text.count + text.count / 4)
        for piece in try split(text) { found += piece.matches ? content : text[piece.range] }
        return found[...]
    }

    /// Return matches and what lies between them; empty matches are left out.
    fileprivate static func divided(_ text: ArraySlice<UInt8>, _ matches: [Range<Int>]) -> [Piece] {
        var found: [Piece] = []
        var last = text.startIndex
        for range in matches where !range.isEmpty {
            if last < range.lowerBound { found.append(Piece(range: last..<range.lowerBound, matches: false)) }
            found.append(Piece(range: range, matches: true))
            last = range.upperBound
        }
        if last < text.endIndex { found.append(Piece(range: last..<text.endIndex, matches: false)) }
        return found
    }
}

/// Return the matches of a regular expression.
///
/// ICU, which runs the expression, goes back without a limit: `(a+)+$` takes 2^n steps for n letters. It reports every
/// 10,000 steps or so, and each place that it tries to begin a match at: one for each character between matches. An
/// expression that divides a text into words takes a few steps for each character.
private func matches(_ regex: NSRegularExpression, _ text: ArraySlice<UInt8>) throws -> [Range<Int>] {
    let string = string(text)
    let whole = NSRange(location: 0, length: string.utf16.count)
    let places = utf8Places(text, utf16Count: whole.length)
    var found: [Range<Int>] = []
    var reports = 200 + 2 * whole.length
    var failed = false
    regex.enumerateMatches(in: string, options: [.reportProgress, .reportCompletion], range: whole) {
        match, flags, stop in
        if let range = match?.range { found.append(places(range.location)..<places(range.location + range.length)) }
        if flags.contains(.progress) { reports -= 1 }
        if flags.contains(.internalError) || reports < 0 {  // an internal error: the places to go back to are too many
            failed = true
            stop.pointee = true
        }
    }
    if failed {
        throw ShardmillError(
            .tokenizer,
            "the pattern '\(regex.pattern.prefix(80))' takes too many steps for a text of \(text.count) bytes")
    }
    return found
}

/// Divide a text into places of another one and what lies between them.
func pieces(of wanted: ArraySlice<UInt8>, in text: ArraySlice<UInt8>) -> [Pattern.Piece] {
    var found: [Range<Int>] = []
    places(of: wanted, in: text) { found.append($0..<$0 + wanted.count) }
    return Pattern.divided(text, found)
}

/// Return a text with all places of another one replaced.
func replaced(
    _ wanted: ArraySlice<UInt8>, in text: ArraySlice<UInt8>, with content: ArraySlice<UInt8>
) -> ArraySlice<UInt8> {
    var found: [UInt8] = []
    found.reserveCapacity(text.count + text.count / 4)
    var last = text.startIndex
    places(of: wanted, in: text) { place in
        found += text[last..<place]
        found += content
        last = place + wanted.count
    }
    if last == text.startIndex { return text }
    found += text[last...]
    return found[...]
}

/// Call a function with each place of a text within another, from left to right, without overlaps.
private func places(of wanted: ArraySlice<UInt8>, in text: ArraySlice<UInt8>, _ found: (Int) -> Void) {
    guard let first = wanted.first else { return }
    let base = text.startIndex
    text.withUnsafeBufferPointer { bytes in
        wanted.withUnsafeBufferPointer { wanted in
            var at = 0
            while at + wanted.count <= bytes.count {
                if bytes[at] == first, (1..<wanted.count).allSatisfy({ bytes[at + $0] == wanted[$0] }) {
                    found(base + at)
                    at += wanted.count
                } else {
                    at += 1
                }
            }
        }
    }
}

/// Return a function from an offset in UTF-16 to the place in UTF-8.
private func utf8Places(_ text: ArraySlice<UInt8>, utf16Count: Int) -> (Int) -> Int {
    if utf16Count == text.count { return { text.startIndex + $0 } }  // ASCII alone
    var places: [Int] = []
    places.reserveCapacity(utf16Count + 1)
    var at = text.startIndex
    while at < text.endIndex {
        let length = utf8Length(text[at])
        places.append(at)
        if length == 4 { places.append(at) }
        at += length
    }
    places.append(text.endIndex)
    return { places[$0] }
}
