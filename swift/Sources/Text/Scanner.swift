/// The division into words of one of the widely used patterns, without a regular expression: on UTF-8, some times
/// faster.
///
/// Any text consists of words of these patterns, without gaps. A test compares them with the regular expressions.
struct Scanner: Equatable, Sendable {
    private enum Contractions { case none, exact, anyCase }
    private enum Words { case letters, cased }

    private let contractions: Contractions  // "'s" and the like as words of their own
    private let words: Words
    private let contracted: Bool  // "'s" and the like at the end of a word
    private let prefix: Bool  // any character but a letter, a number or a line break may begin a word; else a space may
    private let spacedNumbers: Bool
    private let digits: Int
    private let breaks: [UInt8]  // what may follow symbols
    private let lines: Bool  // white space up to its last line break is a word

    /// Return the scanner of a pattern; nil if it is none of those known.
    init?(pattern: String) {
        let short = "'s|'t|'re|'ve|'m|'ll|'d"
        let rest = #"|\s+(?!\S)|\s+"#
        let lines = #"|\s*[\r\n]+"# + rest
        let others = #" ?[^\s\p{L}\p{N}]+"#
        let lower = #"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"#
        let upper = #"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"#
        let start = #"[^\r\n\p{L}\p{N}]?"#
        self.lines = pattern.contains("[\\r\\n]+")
        let count = [#"\p{N}{1,3}"#: 3, #"\p{N}"#: 1]
        if pattern == short + #"| ?\p{L}+| ?\p{N}+|"# + others + rest {
            (contractions, words, contracted, prefix, spacedNumbers, digits, breaks) = (
                .exact, .letters, false, false, true, .max, []
            )
            return
        }
        for (numbers, most) in count {
            if pattern == "(?i:\(short))|\(start)\\p{L}+|\(numbers)|\(others)[\\r\\n]*\(lines)" {
                (contractions, words, contracted, prefix, spacedNumbers, digits, breaks) =
                    (.anyCase, .letters, false, true, false, most, [0x0A, 0x0D])
                return
            }
            for end in ["(?i:\(short))?", ""]
            where pattern == "\(start)\(lower)\(end)|\(start)\(upper)\(end)|\(numbers)|\(others)[\\r\\n/]*\(lines)" {
                (contractions, words, contracted, prefix, spacedNumbers, digits, breaks) =
                    (.none, .cased, !end.isEmpty, true, false, most, [0x0A, 0x0D, 0x2F])
                return
            }
        }
        return nil
    }

    /// Return the end of the word that begins at a place.
    func end(_ text: UnsafeBufferPointer<UInt8>, _ start: Int) -> Int {
        let (first, second) = Class.at(text, start)
        if contractions != .none, text[start] == 0x27,
            let end = contraction(text, start, anyCase: contractions == .anyCase)
        {
            return end
        }
        if words == .cased {
            if let end = casedWord(text, start, first, second) {
                return contracted ? contraction(text, end, anyCase: true) ?? end : end
            }
        } else {
            if first.contains(.letter) { return run(text, second, .letter) }
            let begins = prefix ? first.isDisjoint(with: [.letter, .number, .line]) : text[start] == 0x20
            if begins, second < text.count, Class.at(text, second).0.contains(.letter) {
                return run(text, second, .letter)
            }
        }
        if first.contains(.number) { return run(text, second, .number, most: digits - 1) }
        let spaced = text[start] == 0x20 && second < text.count
        let next = spaced ? Class.at(text, second).0 : []
        if spacedNumbers && next.contains(.number) { return run(text, second, .number) }
        let wordLike: Class = [.space, .letter, .number]
        if first.isDisjoint(with: wordLike) || (spaced && next.isDisjoint(with: wordLike)) {
            var end = second
            while end < text.count {
                let (kind, after) = Class.at(text, end)
                if !kind.isDisjoint(with: wordLike) { break }
                end = after
            }
            while end < text.count, breaks.contains(text[end]) { end += 1 }
            return end
        }
        return spaces(text, start)
    }

    /// Return the end of white space that is a word: up to its last line break, else without its last character.
    private func spaces(_ text: UnsafeBufferPointer<UInt8>, _ start: Int) -> Int {
        var (end, last, line) = (start, start, start)
        while end < text.count {
            let (kind, after) = Class.at(text, end)
            if !kind.contains(.space) { break }
            last = end
            end = after
            if kind.contains(.line) { line = end }
        }
        if lines && line > start { return line }
        return end == text.count || last == start ? end : last
    }

    private func run(_ text: UnsafeBufferPointer<UInt8>, _ start: Int, _ wanted: Class, most: Int = .max) -> Int {
        var (at, left) = (start, most)
        while at < text.count, left > 0 {
            let (kind, after) = Class.at(text, at)
            if !kind.contains(wanted) { break }
            (at, left) = (after, left - 1)
        }
        return at
    }

    /// Return the end of a word of capitals and then small letters; nil if none begins here.
    private func casedWord(_ text: UnsafeBufferPointer<UInt8>, _ start: Int, _ first: Class, _ second: Int) -> Int? {
        let prefixed = first.isDisjoint(with: [.letter, .number, .line]) && second < text.count
        let cased: Class = [.upper, .lower]
        if prefixed, !Class.at(text, second).0.isDisjoint(with: cased), let end = smallEnd(text, second).small {
            return end
        }
        if first.isDisjoint(with: cased) && !prefixed { return nil }
        let bare = smallEnd(text, start)
        if let end = bare.small { return end }
        if prefixed {
            let end = smallEnd(text, second).capitals
            if end > second { return end }
        }
        return bare.capitals > start ? bare.capitals : nil
    }

    /// Return the end of capitals* small+, if there is one, and of capitals* alone.
    ///
    /// Letters without case count as both. If no small letter follows the capitals, the last such letter ends the word.
    private func smallEnd(_ text: UnsafeBufferPointer<UInt8>, _ start: Int) -> (small: Int?, capitals: Int) {
        var at = start
        var both: Int?
        while at < text.count {
            let (kind, after) = Class.at(text, at)
            if !kind.contains(.upper) {
                if kind.contains(.lower) { return (run(text, at, .lower), at) }
                break
            }
            at = after
            if kind.contains(.lower) { both = after }
        }
        return (both, at)
    }

    private func contraction(_ text: UnsafeBufferPointer<UInt8>, _ start: Int, anyCase: Bool) -> Int? {
        guard start + 1 < text.count, text[start] == 0x27 else { return nil }
        let fold: UInt8 = anyCase ? 0x20 : 0
        let first = text[start + 1] | fold
        switch first {
        case UInt8(ascii: "s"), UInt8(ascii: "t"), UInt8(ascii: "m"), UInt8(ascii: "d"): return start + 2
        case 0xC5 | fold where anyCase && text[start + 1] == 0xC5 && start + 2 < text.count && text[start + 2] == 0xBF:
            return start + 3  // the long s
        case UInt8(ascii: "r"), UInt8(ascii: "v"):
            return start + 2 < text.count && text[start + 2] | fold == UInt8(ascii: "e") ? start + 3 : nil
        case UInt8(ascii: "l"):
            return start + 2 < text.count && text[start + 2] | fold == UInt8(ascii: "l") ? start + 3 : nil
        default: return nil
        }
    }
}

/// The kinds of characters that patterns tell apart.
struct Class: OptionSet, Sendable {
    let rawValue: UInt8

    static let letter = Class(rawValue: 1)
    static let number = Class(rawValue: 2)
    static let space = Class(rawValue: 4)
    static let line = Class(rawValue: 8)
    /// Capitals, letters without case and marks.
    static let upper = Class(rawValue: 16)
    /// Small letters, letters without case and marks.
    static let lower = Class(rawValue: 32)

    private static let ascii: [Class] = (0..<128).map { Class(Unicode.Scalar(UInt8($0))) }

    init(rawValue: UInt8) { self.rawValue = rawValue }

    init(_ scalar: Unicode.Scalar) {
        let properties = scalar.properties
        switch properties.generalCategory {
        case .uppercaseLetter, .titlecaseLetter: self = [.letter, .upper]
        case .lowercaseLetter: self = [.letter, .lower]
        case .modifierLetter, .otherLetter: self = [.letter, .upper, .lower]
        case .nonspacingMark, .spacingMark, .enclosingMark: self = [.upper, .lower]
        case .decimalNumber, .letterNumber, .otherNumber: self = .number
        default: self = scalar == "\r" || scalar == "\n" ? [.space, .line] : properties.isWhitespace ? .space : []
        }
    }

    /// Return the kind of the character at a place, and the place after it.
    @inline(__always)
    static func at(_ text: UnsafeBufferPointer<UInt8>, _ place: Int) -> (Class, Int) {
        let first = text[place]
        if first < 0x80 { return (ascii[Int(first)], place + 1) }
        let length = utf8Length(first)
        guard place + length <= text.count else { return ([], text.count) }
        var value = UInt32(first & (0xFF >> UInt8(length + 1)))
        for step in 1..<length { value = value << 6 | UInt32(text[place + step] & 0x3F) }
        return (Unicode.Scalar(value).map(Class.init) ?? [], place + length)
    }
}
