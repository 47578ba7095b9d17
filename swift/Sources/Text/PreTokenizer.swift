import ShardmillDecode

/// A division of the text into words.
indirect enum PreTokenizer: Sendable {
    /// What becomes of a match: a word of its own, nothing, or a part of the word before or after it.
    enum Behavior: String, Sendable { case Isolated, Removed, MergedWithPrevious, MergedWithNext, Contiguous }

    enum Prepend: String, Sendable { case always, first, never }

    case sequence([PreTokenizer])
    case split(Pattern, Behavior, invert: Bool)
    case byteLevel(prefixSpace: Bool, pattern: Pattern?)
    /// As byteLevel, but bytes stay as they are.
    case bytes(prefixSpace: Bool, pattern: Pattern?)
    case digits(individual: Bool)
    case metaspace(ArraySlice<UInt8>, Prepend, splits: Bool)
    case bert
    case whitespace(Pattern)
    case whitespaceSplit
    case punctuation(Behavior)

    private static let gpt2 = #"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"#

    /// - Throws: `ShardmillError` that names a type which this version does not support.
    init(_ json: JSON) throws {
        func behavior() throws -> Behavior {
            let name = try json.optionalBytes("behavior").map(string) ?? "Isolated"
            guard let found = Behavior(rawValue: name) else {
                throw ShardmillError(.tokenizer, "the behavior '\(name)' of a split is not supported")
            }
            return found
        }
        switch json.type {
        case "Sequence": self = .sequence(try json.items("pretokenizers").map(PreTokenizer.init))
        case "Split":
            self = .split(try Pattern(json["pattern"]), try behavior(), invert: try json.flag("invert") ?? false)
        case "ByteLevel":
            let pattern = try json.flag("use_regex") ?? true ? try Pattern(regex: Self.gpt2) : nil
            self = .byteLevel(prefixSpace: try json.flag("add_prefix_space") ?? true, pattern: pattern)
        case "Digits": self = .digits(individual: try json.flag("individual_digits") ?? false)
        case "Metaspace":
            let scheme =
                try json.optionalBytes("prepend_scheme").map(string)
                ?? (try json.flag("add_prefix_space") ?? true ? "always" : "never")
            guard let prepend = Prepend(rawValue: scheme) else {
                throw ShardmillError(.tokenizer, "the prepend_scheme '\(scheme)' is not supported")
            }
            self = .metaspace(
                try json.optionalBytes("replacement") ?? ArraySlice("\u{2581}".utf8), prepend,
                splits: try json.flag("split") ?? true)
        case "BertPreTokenizer": self = .bert
        case "Whitespace": self = .whitespace(try Pattern(regex: #"\w+|[^\w\s]+"#))
        case "WhitespaceSplit": self = .whitespaceSplit
        case "Punctuation": self = .punctuation(try behavior())
        case let type: throw ShardmillError(.tokenizer, "the pre-tokenizer '\(type)' is not supported")
        }
    }

    /// Return the same without a last step that writes bytes as letters; nil if the last step does not.
    var withoutLetters: PreTokenizer? {
        switch self {
        case .byteLevel(let prefixSpace, let pattern): return .bytes(prefixSpace: prefixSpace, pattern: pattern)
        case .sequence(let steps):
            guard let last = steps.last?.withoutLetters else { return nil }
            return steps.dropLast().contains { $0.withoutLetters != nil } ? nil : .sequence(steps.dropLast() + [last])
        default: return nil
        }
    }

    /// Whether words are slices of the text, so that their places are known.
    var keepsBytes: Bool {
        switch self {
        case .sequence(let steps): steps.allSatisfy(\.keepsBytes)
        case .byteLevel, .metaspace: false
        case .bytes(let prefixSpace, _): !prefixSpace
        default: true
        }
    }

    /// Return the scanner that alone divides the text; nil if there is more to do.
    var scanner: Scanner? {
        switch self {
        case .bytes(false, .scanner(let scanner)?), .split(.scanner(let scanner), .Isolated, _): return scanner
        case .sequence(let steps):
            let scanners = steps.compactMap(\.scanner)
            let others = steps.filter { $0.scanner == nil }
            guard scanners.count == 1 else { return nil }
            return others.allSatisfy { if case .bytes(false, nil) = $0 { true } else { false } } ? scanners[0] : nil
        default: return nil
        }
    }

    /// Divide words further.
    ///
    /// - Parameters:
    ///   - words: pieces of the text, in order.
    ///   - first: whether the first piece begins the text.
    /// - Throws: `ShardmillError` of kind `tokenizer` if a regular expression takes too many steps.
    func apply(_ words: [ArraySlice<UInt8>], first: Bool) throws -> [ArraySlice<UInt8>] {
        switch self {
        case .sequence(let steps): return try steps.reduce(words) { try $1.apply($0, first: first) }
        case .split(let pattern, let behavior, let invert):
            return try words.flatMap { word in
                let pieces = try pattern.split(word).map {
                    Pattern.Piece(range: $0.range, matches: $0.matches != invert)
                }
                return join(word, pieces, behavior)
            }
        case .byteLevel(let prefixSpace, let pattern):
            let steps = PreTokenizer.bytes(prefixSpace: prefixSpace, pattern: pattern)
            return try steps.apply(words, first: first).map { ByteAlphabet.letters($0)[...] }
        case .bytes(let prefixSpace, let pattern):
            return try words.flatMap { word in
                let spaced = prefixSpace && word.first != 0x20 && !word.isEmpty ? [0x20] + word : word
                return try pattern.map { try $0.split(spaced).map { spaced[$0.range] } } ?? [spaced]
            }
        case .digits(let individual):
            return words.flatMap { divide($0, individual ? .Isolated : .Contiguous) { Class($0).contains(.number) } }
        case .metaspace(let mark, let prepend, let splits):
            return words.enumerated().flatMap { place, word in
                var marked = Array(
                    word.split(separator: 0x20, omittingEmptySubsequences: false).joined(separator: mark))
                let wanted = prepend == .always || (prepend == .first && first && place == 0)
                if wanted && !marked.isEmpty && !marked.starts(with: mark) { marked.insert(contentsOf: mark, at: 0) }
                return splits
                    ? join(marked[...], pieces(of: mark, in: marked[...]), .MergedWithNext) : [marked[...]]
            }
        case .bert:
            return words.flatMap { divide($0, .Removed, isSpace) }.flatMap { divide($0, .Isolated, isPunctuation) }
        case .whitespace(let pattern):
            return try words.flatMap { word in try pattern.split(word).filter(\.matches).map { word[$0.range] } }
        case .whitespaceSplit: return words.flatMap { divide($0, .Removed, isSpace) }
        case .punctuation(let behavior): return words.flatMap { divide($0, behavior, isPunctuation) }
        }
    }

    /// Divide a word at the scalars for which a function is true.
    private func divide(
        _ word: ArraySlice<UInt8>, _ behavior: Behavior, _ wanted: (Unicode.Scalar) -> Bool
    ) -> [ArraySlice<UInt8>] {
        var pieces: [Pattern.Piece] = []
        var at = word.startIndex
        for scalar in string(word).unicodeScalars {
            let end = at + UTF8.width(scalar)
            let matches = wanted(scalar)
            if !matches, let last = pieces.last, !last.matches {
                pieces[pieces.count - 1] = Pattern.Piece(range: last.range.lowerBound..<end, matches: false)
            } else {
                pieces.append(Pattern.Piece(range: at..<end, matches: matches))
            }
            at = end
        }
        return join(word, pieces, behavior)
    }

    private func join(_ word: ArraySlice<UInt8>, _ pieces: [Pattern.Piece], _ behavior: Behavior) -> [ArraySlice<UInt8>]
    {
        var found: [Range<Int>] = []
        var joinsNext = false
        var lastMatches = false
        for piece in pieces {
            switch behavior {
            case .Removed where piece.matches: break
            case .MergedWithPrevious where piece.matches && !lastMatches && !found.isEmpty,
                .Contiguous where piece.matches == lastMatches && !found.isEmpty:
                found[found.count - 1] = found.last!.lowerBound..<piece.range.upperBound
            case .MergedWithNext where joinsNext && !piece.matches:
                found[found.count - 1] = found.last!.lowerBound..<piece.range.upperBound
            default: found.append(piece.range)
            }
            joinsNext = piece.matches
            lastMatches = piece.matches
        }
        return found.map { word[$0] }
    }
}

/// The letters that stand for bytes in GPT-2's vocabulary and those made after it.
enum ByteAlphabet {
    private static let scalars: [Unicode.Scalar] = {
        var next: UInt32 = 256
        return (UInt32(0)...255).map { byte in
            if (0x21...0x7E).contains(byte) || (0xA1...0xAC).contains(byte) || (0xAE...0xFF).contains(byte) {
                return Unicode.Scalar(byte)!
            }
            defer { next += 1 }
            return Unicode.Scalar(next)!
        }
    }()

    static let utf8 = scalars.map { Array(UTF8.encode($0)!) }
    private static let bytes: [Int16] = {  // by scalar, -1 if it stands for no byte
        var found = [Int16](repeating: -1, count: 512)
        for (byte, scalar) in scalars.enumerated() { found[Int(scalar.value)] = Int16(byte) }
        return found
    }()

    /// Return the letters of some bytes.
    static func letters(_ bytes: some Sequence<UInt8>) -> [UInt8] {
        var found: [UInt8] = []
        for byte in bytes { found += utf8[Int(byte)] }
        return found
    }

    /// Append the bytes of some letters; the text itself if it has others.
    static func append(_ letters: ArraySlice<UInt8>, to found: inout [UInt8]) {
        let before = found.count
        var at = letters.startIndex
        while at < letters.endIndex {
            var scalar = Int(letters[at])
            if scalar >= 0xC0, scalar < 0xE0, at + 1 < letters.endIndex {
                at += 1
                scalar = (scalar & 0x1F) << 6 | Int(letters[at] & 0x3F)
            } else if scalar >= 0x80 {
                scalar = 0  // no letter is written with more bytes, and 0 stands for none
            }
            at += 1
            guard scalar < bytes.count, bytes[scalar] >= 0 else {
                found.removeSubrange(before...)
                found += letters
                return
            }
            found.append(UInt8(bytes[scalar]))
        }
    }
}

private func isPunctuation(_ scalar: Unicode.Scalar) -> Bool {
    if scalar.isASCII {
        return (0x21...0x2F).contains(scalar.value) || (0x3A...0x40).contains(scalar.value)
            || (0x5B...0x60).contains(scalar.value) || (0x7B...0x7E).contains(scalar.value)
    }
    switch scalar.properties.generalCategory {
    case .connectorPunctuation, .dashPunctuation, .openPunctuation, .closePunctuation, .initialPunctuation,
        .finalPunctuation, .otherPunctuation:
        return true
    default: return false
    }
}
