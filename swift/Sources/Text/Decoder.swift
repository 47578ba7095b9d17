import ShardmillDecode

/// A step from tokens back to text.
indirect enum Decoder: Sendable {
    case sequence([Decoder])
    case byteLevel
    case replace(ArraySlice<UInt8>, ArraySlice<UInt8>)
    case byteFallback
    case fuse
    case strip(ArraySlice<UInt8>, start: Int, stop: Int)
    case wordPiece(ArraySlice<UInt8>, cleanup: Bool)
    case metaspace(ArraySlice<UInt8>, prepends: Bool)

    /// - Throws: `ShardmillError` that names a type which this version does not support.
    init(_ json: JSON) throws {
        switch json.type {
        case "Sequence": self = .sequence(try json.items("decoders").map(Decoder.init))
        case "ByteLevel": self = .byteLevel
        case "Replace":
            guard case .text(let wanted) = try Pattern(json["pattern"]) else {
                throw ShardmillError(.tokenizer, "a decoder that replaces a regular expression is not supported")
            }
            self = .replace(wanted, try json.bytes("content"))
        case "ByteFallback": self = .byteFallback
        case "Fuse": self = .fuse
        case "Strip":
            let content = try json.optionalBytes("content") ?? ArraySlice(" ".utf8)
            self = .strip(content, start: try json.count("start") ?? 0, stop: try json.count("stop") ?? 0)
        case "WordPiece":
            let prefix = try json.optionalBytes("prefix") ?? ArraySlice("##".utf8)
            self = .wordPiece(prefix, cleanup: try json.flag("cleanup") ?? true)
        case "Metaspace":
            let scheme = try json.optionalBytes("prepend_scheme").map(string)
            let prepends = try scheme.map { $0 != "never" } ?? json.flag("add_prefix_space") ?? true
            self = .metaspace(try json.optionalBytes("replacement") ?? ArraySlice("\u{2581}".utf8), prepends: prepends)
        case let type: throw ShardmillError(.tokenizer, "the decoder '\(type)' is not supported")
        }
    }

    func apply(_ tokens: [ArraySlice<UInt8>]) -> [ArraySlice<UInt8>] {
        switch self {
        case .sequence(let steps): return steps.reduce(tokens) { $1.apply($0) }
        case .byteLevel:
            var found: [UInt8] = []
            for token in tokens { ByteAlphabet.append(token, to: &found) }
            return [found[...]]
        case .fuse: return [joined(tokens)]
        case .byteFallback: return fallback(tokens)
        case .replace(let wanted, let content): return tokens.map { replaced(wanted, in: $0, with: content) }
        case .strip(let content, let start, let stop):
            return tokens.map { token in
                var token = token
                if content.isEmpty { return token }
                var (first, last) = (start, stop)
                while first > 0, token.starts(with: content) {
                    (token, first) = (token.dropFirst(content.count), first - 1)
                }
                while last > 0, token.suffix(content.count).elementsEqual(content) {
                    (token, last) = (token.dropLast(content.count), last - 1)
                }
                return token
            }
        case .wordPiece(let prefix, let cleanup):
            return tokens.enumerated().map { place, token in
                var text = token
                if place > 0 { text = token.starts(with: prefix) ? token.dropFirst(prefix.count) : [0x20] + token }
                return cleanup ? cleaned(text) : text
            }
        case .metaspace(let mark, let prepends):
            return tokens.enumerated().map { place, token in
                let text = Array(pieces(of: mark, in: token).flatMap { $0.matches ? [0x20] : token[$0.range] })
                return place == 0 && prepends && text.first == 0x20 ? text.dropFirst() : text[...]
            }
        }
    }

    /// Turn runs of tokens <0xXX> into the characters that their bytes are; each byte of a wrong run becomes U+FFFD.
    private func fallback(_ tokens: [ArraySlice<UInt8>]) -> [ArraySlice<UInt8>] {
        var found: [ArraySlice<UInt8>] = []
        var run: [UInt8] = []
        func end() {
            if run.isEmpty { return }
            if String(validating: run, as: UTF8.self) != nil {
                found.append(run[...])
            } else {
                found += run.map { _ in ArraySlice("\u{FFFD}".utf8) }
            }
            run = []
        }
        for token in tokens {
            if token.count == 6, token.starts(with: "<0x".utf8), token.last == UInt8(ascii: ">"),
                let byte = UInt8(string(token.dropFirst(3).dropLast()), radix: 16)
            {
                run.append(byte)
            } else {
                end()
                found.append(token)
            }
        }
        end()
        return found
    }

    private func cleaned(_ text: ArraySlice<UInt8>) -> ArraySlice<UInt8> {
        let changes = [
            (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
            (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
        ]
        return changes.reduce(text) { text, change in
            replaced(ArraySlice(change.0.utf8), in: text, with: ArraySlice(change.1.utf8))
        }
    }
}

/// Return the bytes of all tokens in a row.
func joined(_ tokens: [ArraySlice<UInt8>]) -> ArraySlice<UInt8> {
    var found: [UInt8] = []
    found.reserveCapacity(tokens.reduce(0) { $0 + $1.count })
    for token in tokens { found += token }
    return found[...]
}
