import Foundation
import ShardmillDecode

/// A change of the text before it is divided into words.
indirect enum Normalizer {
    case sequence([Normalizer])
    case nfc, nfd, nfkc, nfkd, lowercase
    case replace(Pattern, ArraySlice<UInt8>)
    case prepend(ArraySlice<UInt8>)
    case strip(left: Bool, right: Bool)
    case bert(clean: Bool, chinese: Bool, stripAccents: Bool, lowercase: Bool)

    /// - Throws: `ShardmillError` that names a type which this version does not support.
    init(_ json: JSON) throws {
        switch json["type"]?.text ?? "" {
        case "Sequence": self = .sequence(try (json["normalizers"]?.items ?? []).map(Normalizer.init))
        case "NFC": self = .nfc
        case "NFD": self = .nfd
        case "NFKC": self = .nfkc
        case "NFKD": self = .nfkd
        case "Lowercase": self = .lowercase
        case "Replace": self = .replace(try Pattern(json["pattern"]), json["content"]?.bytes ?? [])
        case "Prepend": self = .prepend(json["prepend"]?.bytes ?? [])
        case "Strip":
            self = .strip(left: json["strip_left"]?.bool ?? true, right: json["strip_right"]?.bool ?? true)
        case "BertNormalizer":
            let lower = json["lowercase"]?.bool ?? true
            self = .bert(
                clean: json["clean_text"]?.bool ?? true, chinese: json["handle_chinese_chars"]?.bool ?? true,
                stripAccents: json["strip_accents"]?.bool ?? lower, lowercase: lower)
        case let type: throw ShardmillError(.tokenizer, "the normalizer '\(type)' is not supported")
        }
    }

    func apply(_ text: ArraySlice<UInt8>) -> ArraySlice<UInt8> {
        switch self {
        case .sequence(let steps): return steps.reduce(text) { $1.apply($0) }
        case .nfc: return ascii(text) ? text : bytes(string(text).precomposedStringWithCanonicalMapping)
        case .nfd: return ascii(text) ? text : bytes(string(text).decomposedStringWithCanonicalMapping)
        case .nfkc: return ascii(text) ? text : bytes(string(text).precomposedStringWithCompatibilityMapping)
        case .nfkd: return ascii(text) ? text : bytes(string(text).decomposedStringWithCompatibilityMapping)
        case .lowercase: return lower(text)
        case .replace(let pattern, let content):
            var found: [UInt8] = []
            for piece in pattern.split(text) { found += piece.matches ? content : text[piece.range] }
            return found[...]
        case .prepend(let prefix): return text.isEmpty ? text : prefix + text
        case .strip(let left, let right):
            var scalars = Substring(string(text)).unicodeScalars
            while left, let first = scalars.first, first.properties.isWhitespace { scalars.removeFirst() }
            while right, let last = scalars.last, last.properties.isWhitespace { scalars.removeLast() }
            return bytes(String(scalars))
        case .bert(let clean, let chinese, let stripAccents, let lowercase):
            return bert(text, clean, chinese, stripAccents, lowercase)
        }
    }

    private func bert(
        _ text: ArraySlice<UInt8>, _ clean: Bool, _ chinese: Bool, _ stripAccents: Bool, _ lowercase: Bool
    ) -> ArraySlice<UInt8> {
        var found = String.UnicodeScalarView()
        for scalar in string(text).unicodeScalars {
            if clean {
                if scalar.value == 0 || scalar.value == 0xFFFD || isControl(scalar) { continue }
                if isSpace(scalar) {
                    found.append(" ")
                    continue
                }
            }
            if chinese && isChinese(scalar) {
                found.append(contentsOf: [" ", scalar, " "])
            } else {
                found.append(scalar)
            }
        }
        var result = bytes(String(found))
        if stripAccents {
            let bare = string(Normalizer.nfd.apply(result)).unicodeScalars.filter { $0.properties.generalCategory != .nonspacingMark }
            result = bytes(String(String.UnicodeScalarView(bare)))
        }
        return lowercase ? lower(result) : result
    }
}

/// What a Split or a Replace looks for.
enum Pattern: @unchecked Sendable {  // NSRegularExpression is immutable and safe to share
    case text(ArraySlice<UInt8>)
    case regex(NSRegularExpression)

    init(_ json: JSON?) throws {
        if let text = json?["String"]?.bytes, !text.isEmpty {
            self = .text(text)
        } else if let regex = json?["Regex"]?.text {
            do {
                self = .regex(try NSRegularExpression(pattern: regex))
            } catch {
                throw ShardmillError(.tokenizer, "the pattern '\(regex.prefix(80))' is not supported")
            }
        } else {
            throw ShardmillError(.tokenizer, "a pattern is neither a text nor a regular expression")
        }
    }

    struct Piece {
        let range: Range<Int>
        let matches: Bool
    }

    /// Divide a text into matches and what lies between them.
    func split(_ text: ArraySlice<UInt8>) -> [Piece] {
        var found: [Piece] = []
        var last = text.startIndex
        func add(_ range: Range<Int>) {
            if range.isEmpty { return }
            if last < range.lowerBound { found.append(Piece(range: last..<range.lowerBound, matches: false)) }
            found.append(Piece(range: range, matches: true))
            last = range.upperBound
        }
        switch self {
        case .text(let wanted):
            var at = text.startIndex
            while at + wanted.count <= text.endIndex {
                if text[at..<at + wanted.count].elementsEqual(wanted) {
                    add(at..<at + wanted.count)
                    at += wanted.count
                } else {
                    at += 1
                }
            }
        case .regex(let regex):
            let string = string(text)
            let whole = NSRange(location: 0, length: string.utf16.count)
            let places = utf8Places(text, utf16Count: whole.length)
            regex.enumerateMatches(in: string, range: whole) { match, _, _ in
                guard let range = match?.range else { return }
                add(places(range.location)..<places(range.location + range.length))
            }
        }
        if last < text.endIndex { found.append(Piece(range: last..<text.endIndex, matches: false)) }
        return found
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

func string(_ bytes: ArraySlice<UInt8>) -> String { String(decoding: bytes, as: UTF8.self) }

private func bytes(_ string: String) -> ArraySlice<UInt8> { Array(string.utf8)[...] }

private func ascii(_ text: ArraySlice<UInt8>) -> Bool { text.allSatisfy { $0 < 0x80 } }

/// Return each scalar's lower case, as Rust's `char::to_lowercase` has it: without regard to the scalars around it.
private func lower(_ text: ArraySlice<UInt8>) -> ArraySlice<UInt8> {
    bytes(string(text).unicodeScalars.map(\.properties.lowercaseMapping).joined())
}

func isSpace(_ scalar: Unicode.Scalar) -> Bool { scalar.properties.isWhitespace }

private func isControl(_ scalar: Unicode.Scalar) -> Bool {
    if scalar == "\t" || scalar == "\n" || scalar == "\r" { return false }
    switch scalar.properties.generalCategory {
    case .control, .format, .unassigned, .privateUse, .surrogate: return true
    default: return false
    }
}

private func isChinese(_ scalar: Unicode.Scalar) -> Bool {
    let blocks: [ClosedRange<UInt32>] = [
        0x4E00...0x9FFF, 0x3400...0x4DBF, 0x20000...0x2A6DF, 0x2A700...0x2B73F, 0x2B740...0x2B81F, 0x2B920...0x2CEAF,
        0xF900...0xFAFF, 0x2F800...0x2FA1F,
    ]
    return blocks.contains { $0.contains(scalar.value) }
}
