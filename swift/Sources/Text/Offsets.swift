import ShardmillDecode

/// The tokens of a text, and where they lie in it.
package struct Encoding: Equatable, Sendable {
    /// The tokens, with those before and after every text.
    package internal(set) var ids: [Int] = []
    /// Where each token lies, in Unicode scalars of the text; empty ranges for tokens that are not of the text.
    package internal(set) var offsets: [Range<Int>] = []
    /// The tokens that are of the text.
    package internal(set) var inside = 0..<0
}

/// A text while it is normalized: UTF-8, and for each byte the scalars of the original text that it came from.
struct AlignedText {
    var bytes: [UInt8] = []
    var origins: [Range<Int>] = []

    init() {}

    init(_ text: String) {
        for (place, scalar) in text.unicodeScalars.enumerated() { append(scalar, place..<place + 1) }
    }

    /// Return the scalars and their origins.
    var scalars: [(scalar: Unicode.Scalar, origin: Range<Int>)] {
        var at = 0
        return string(bytes[...]).unicodeScalars.map { scalar in
            defer { at += UTF8.width(scalar) }
            return (scalar, origins[at])
        }
    }

    mutating func append(_ scalar: Unicode.Scalar, _ origin: Range<Int>) {
        for byte in UTF8.encode(scalar)! {
            bytes.append(byte)
            origins.append(origin)
        }
    }

    mutating func append(_ text: String, _ origin: Range<Int>) {
        for scalar in text.unicodeScalars { append(scalar, origin) }
    }

    /// Return the scalars of some bytes' origins, from the first to the last.
    func origin(_ range: Range<Int>) -> Range<Int> {
        range.isEmpty ? 0..<0 : origins[range.lowerBound].lowerBound..<origins[range.upperBound - 1].upperBound
    }

    subscript(range: Range<Int>) -> AlignedText {
        var found = AlignedText()
        found.bytes = Array(bytes[range])
        found.origins = Array(origins[range])
        return found
    }
}

extension Normalizer {
    /// Do as `apply`, and keep where the text came from, as the package `tokenizers` does.
    ///
    /// - Throws: `ShardmillError` that names a type for which this version can't tell.
    func apply(_ text: AlignedText) throws -> AlignedText {
        var found = AlignedText()
        switch self {
        case .sequence(let steps): return try steps.reduce(text) { try $1.apply($0) }
        case .lowercase:
            for (scalar, origin) in text.scalars { found.append(scalar.properties.lowercaseMapping, origin) }
        case .nfc: compose(text.scalars, into: &found)
        case .bert:
            for (scalar, origin) in text.scalars {
                found.append(string(try apply(Array(UTF8.encode(scalar)!)[...])), origin)
            }
        default:
            throw ShardmillError(.tokenizer, "the places of tokens after the normalizer '\(self)' are not supported")
        }
        return found
    }

    /// Compose a character and the marks that follow it. A composed character came from its first scalar.
    private func compose(_ scalars: [(scalar: Unicode.Scalar, origin: Range<Int>)], into found: inout AlignedText) {
        var start = 0
        while start < scalars.count {
            var end = start + 1
            while end < scalars.count, joins(scalars[end].scalar) { end += 1 }
            let given = scalars[start..<end].map(\.scalar)
            let text = String(String.UnicodeScalarView(given)).precomposedStringWithCanonicalMapping.unicodeScalars
            for (place, scalar) in text.enumerated() {
                let from = place == 0 ? start : max(start, end - text.count + place)
                found.append(scalar, scalars[min(from, end - 1)].origin)
            }
            start = end
        }
    }

    /// Return whether a scalar may be composed with those before it: a mark, or a letter of Korean.
    private func joins(_ scalar: Unicode.Scalar) -> Bool {
        switch scalar.properties.generalCategory {
        case .nonspacingMark, .spacingMark, .enclosingMark: true
        default: (0x1160...0x11FF).contains(scalar.value)
        }
    }
}

extension Tokenizer {
    /// Return a text's tokens and where they lie in it, with the tokens before and after every text.
    ///
    /// - Throws: `ShardmillError` if the tokenizer changes a text in a way for which this version can't tell.
    package func encodeWithOffsets(_ text: String) throws -> Encoding {
        var found = Encoding()
        found.ids = prefix
        let whole = AlignedText(text)
        for piece in added.split(whole.bytes[...], normalized: false) {
            let range = piece.bytes.startIndex..<piece.bytes.endIndex
            if let id = piece.id {
                add(id, whole.origin(range), to: &found)
                continue
            }
            let text = try normalizer?.apply(whole[range]) ?? whole[range]
            for piece in added.split(text.bytes[...], normalized: true) {
                if let id = piece.id {
                    add(id, text.origin(piece.bytes.startIndex..<piece.bytes.endIndex), to: &found)
                } else {
                    for word in try words(piece.bytes) { try add(word, of: text, to: &found) }
                }
            }
        }
        found.inside = prefix.count..<found.ids.count
        found.ids += suffix
        let none = prefix.map { _ in 0..<0 }
        found.offsets = none + found.offsets + suffix.map { _ in 0..<0 }
        return found
    }

    private func add(_ id: Int, _ origin: Range<Int>, to found: inout Encoding) {
        found.ids.append(id)
        found.offsets.append(trimsOffsets ? trimmed(origin, id) : origin)
    }

    /// Return a piece's words, which are slices of it.
    private func words(_ piece: ArraySlice<UInt8>) throws -> [ArraySlice<UInt8>] {
        guard let preTokenizer else { return [piece] }
        if !preTokenizer.keepsBytes {
            throw ShardmillError(
                .tokenizer, "the places of tokens after the pre-tokenizer '\(preTokenizer)' are not supported")
        }
        return try preTokenizer.apply([piece], first: true)
    }

    /// Add the tokens of a word. The bytes of a token say how far it reaches.
    private func add(_ word: ArraySlice<UInt8>, of text: AlignedText, to found: inout Encoding) throws {
        var at = word.startIndex
        for (place, id) in ids(of: word).enumerated() {
            guard let token = vocabulary.token(id) else { continue }
            var count = token.count
            switch model {
            case .wordPiece(let pieces):
                count = pieces.isUnknown(id) ? word.count : count - (place == 0 ? 0 : pieces.prefix.count)
            case .bpe(let bpe):
                if !bpe.isOfBytes {
                    throw ShardmillError(
                        .tokenizer, "the places of tokens of a BPE model that is not of bytes are not supported")
                }
                count = token.reduce(0) { $0 + ($1 & 0xC0 == 0x80 ? 0 : 1) }  // a letter for each byte
            }
            let end = min(at + count, word.endIndex)
            add(id, text.origin(at..<end), to: &found)
            at = end
        }
    }

    /// Return the tokens of a word.
    private func ids(of word: ArraySlice<UInt8>) -> [Int] {
        var found: [Int] = []
        word.withUnsafeBufferPointer { bytes in
            if bytes.isEmpty { return }
            switch model {
            case .bpe(let bpe): bpe.encode(bytes, WordCache(), into: &found)
            case .wordPiece(let wordPiece): wordPiece.encode(bytes, into: &found)
            }
        }
        return found
    }

    /// Return where a token lies without the spaces at its ends, which its letters say.
    private func trimmed(_ origin: Range<Int>, _ id: Int) -> Range<Int> {
        guard let token = added.normal[id] ?? vocabulary.token(id) else { return origin }
        let letters = string(token).unicodeScalars
        func isBlank(_ letter: Unicode.Scalar) -> Bool { letter == "\u{120}" || isSpace(letter) }
        let start = min(origin.lowerBound + letters.prefix(while: isBlank).count, origin.upperBound)
        let trailing = letters.reversed().prefix(while: isBlank).count
        let end =
            trailing > 0 && origin.upperBound >= trailing ? max(origin.upperBound - trailing, start) : origin.upperBound
        return start..<end
    }
}
