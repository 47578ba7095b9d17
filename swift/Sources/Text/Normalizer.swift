import Foundation
import ShardmillDecode

/// A change of the text before it is divided into words.
indirect enum Normalizer: Sendable {
    case sequence([Normalizer])
    case nfc, nfd, nfkc, nfkd, lowercase
    case replace(Pattern, ArraySlice<UInt8>)
    case prepend(ArraySlice<UInt8>)
    case strip(left: Bool, right: Bool)
    case bert(clean: Bool, chinese: Bool, stripAccents: Bool, lowercase: Bool)

    /// - Throws: `ShardmillError` that names a type which this version does not support.
    init(_ json: JSON) throws {
        switch json.type {
        case "Sequence": self = .sequence(try json.items("normalizers").map(Normalizer.init))
        case "NFC": self = .nfc
        case "NFD": self = .nfd
        case "NFKC": self = .nfkc
        case "NFKD": self = .nfkd
        case "Lowercase": self = .lowercase
        case "Replace": self = .replace(try Pattern(json["pattern"]), try json.bytes("content"))
        case "Prepend": self = .prepend(try json.bytes("prepend"))
        case "Strip":
            self = .strip(left: try json.flag("strip_left") ?? true, right: try json.flag("strip_right") ?? true)
        case "BertNormalizer":
            let lower = try json.flag("lowercase") ?? true
            self = .bert(
                clean: try json.flag("clean_text") ?? true, chinese: try json.flag("handle_chinese_chars") ?? true,
                stripAccents: try json.flag("strip_accents") ?? lower, lowercase: lower)
        case let type: throw ShardmillError(.tokenizer, "the normalizer '\(type)' is not supported")
        }
    }

    func apply(_ text: ArraySlice<UInt8>) throws -> ArraySlice<UInt8> {
        switch self {
        case .sequence(let steps): return try steps.reduce(text) { try $1.apply($0) }
        case .nfc: return ascii(text) ? text : bytes(string(text).precomposedStringWithCanonicalMapping)
        case .nfd: return ascii(text) ? text : bytes(string(text).decomposedStringWithCanonicalMapping)
        case .nfkc: return ascii(text) ? text : bytes(string(text).precomposedStringWithCompatibilityMapping)
        case .nfkd: return ascii(text) ? text : bytes(string(text).decomposedStringWithCompatibilityMapping)
        case .lowercase: return lower(text)
        case .replace(let pattern, let content):
            return try pattern.replace(text, with: content)
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
            let bare = string(result).decomposedStringWithCanonicalMapping.unicodeScalars.filter {
                $0.properties.generalCategory != .nonspacingMark
            }
            result = bytes(String(String.UnicodeScalarView(bare)))
        }
        return lowercase ? lower(result) : result
    }
}

func string(_ bytes: ArraySlice<UInt8>) -> String { String(decoding: bytes, as: UTF8.self) }

private func bytes(_ string: String) -> ArraySlice<UInt8> { Array(string.utf8)[...] }

private func ascii(_ text: ArraySlice<UInt8>) -> Bool { text.allSatisfy { $0 < 0x80 } }

/// Return each scalar's lower case, as Rust's `char::to_lowercase` has it: without regard to the scalars around it.
private func lower(_ text: ArraySlice<UInt8>) -> ArraySlice<UInt8> {
    bytes(string(text).unicodeScalars.map(\.properties.lowercaseMapping).joined())
}

func isSpace(_ scalar: Unicode.Scalar) -> Bool { scalar.properties.isWhitespace }

/// Return whether BERT's normalizer drops a character. What Unicode has not assigned stays, as in the crate.
private func isControl(_ scalar: Unicode.Scalar) -> Bool {
    if scalar == "\t" || scalar == "\n" || scalar == "\r" { return false }
    switch scalar.properties.generalCategory {
    case .control, .format, .privateUse, .surrogate: return true
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
