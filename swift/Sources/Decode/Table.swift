import Foundation

/// The host's table of embeddings, mapped from its file: rows of fp16, or of int8 with a scale for each row.
public struct Table: Sendable {
    /// The number of rows.
    public let rows: Int
    /// The number of channels of a row.
    public let columns: Int
    private let data: Data
    private let start: Int
    private let scales: Int?

    private struct Entry: Decodable {
        let dtype: String
        let shape: [Int]
        let data_offsets: [Int]
    }

    private static func refusal(_ file: URL, _ reason: String) -> ShardmillError {
        ShardmillError(.build, "\(file.path): \(reason)")
    }

    /// Map a safetensors file; return it, its tensors by name, and the first byte after its header.
    private static func map(_ file: URL) throws -> (Data, [String: Entry], Int) {
        guard let data = try? Data(contentsOf: file, options: .alwaysMapped) else {
            throw refusal(file, "it can't be read")
        }
        guard data.count >= 8 else { throw refusal(file, "it is truncated") }
        let size = data.prefix(8).enumerated().reduce(UInt64(0)) { $0 | UInt64($1.element) << (8 * UInt64($1.offset)) }
        guard size <= UInt64(data.count - 8), size <= 100_000_000 else {
            throw refusal(file, "its header is truncated")
        }
        do {
            var all = try JSONSerialization.jsonObject(with: data[8..<8 + Int(size)]) as? [String: Any] ?? [:]
            all["__metadata__"] = nil
            let text = try JSONSerialization.data(withJSONObject: all)
            return (data, try JSONDecoder().decode([String: Entry].self, from: text), 8 + Int(size))
        } catch {
            throw refusal(file, "its header is damaged: \(describe(error))")
        }
    }

    /// Return whether a safetensors file has a tensor.
    static func contains(_ name: String, _ file: URL) throws -> Bool { try map(file).1[name] != nil }

    /// Map the tensor `name` of a safetensors file. The file's header says where it lies.
    ///
    /// - Throws: `ShardmillError` of kind `build` if the file is truncated, or contains no such table.
    public init(_ file: URL, name: String = "embedding") throws {
        func refuse(_ reason: String) -> ShardmillError { Self.refusal(file, reason) }
        let (data, entries, content) = try Self.map(file)
        /// Return the first byte of a tensor after checking its type, shape and place.
        func place(_ name: String, _ types: [String: Int], _ extents: Int) throws -> (Int, Entry) {
            guard let entry = entries[name] else { throw refuse("it contains no tensor '\(name)'") }
            guard let bytes = types[entry.dtype], entry.shape.count == extents,
                entry.shape.allSatisfy({ (1...1 << 28).contains($0) }), entry.data_offsets.count == 2
            else { throw refuse("the tensor '\(name)' is \(entry.dtype) \(entry.shape)") }
            let begin = entry.data_offsets[0]
            let end = entry.data_offsets[1]
            guard begin >= 0, end <= data.count - content, begin <= end,
                end - begin == entry.shape.reduce(bytes, *)
            else { throw refuse("the tensor '\(name)' is truncated") }
            return (content + begin, entry)
        }
        let (start, entry) = try place(name, ["F16": 2, "I8": 1], 2)
        rows = entry.shape[0]
        columns = entry.shape[1]
        if entry.dtype == "I8" {
            let (at, scale) = try place(name + ".scale", ["F16": 2], 1)
            guard scale.shape[0] == rows else { throw refuse("it has \(scale.shape[0]) scales for \(rows) rows") }
            scales = at
        } else {
            scales = nil
        }
        self.start = start
        self.data = data
    }

    /// Return rows as columns: [1, columns + carry, T, 1], the last `carry` channels zero.
    public func columns(of tokens: [Int], carry: Int = 0) throws -> HostArray {
        if let stray = tokens.first(where: { !(0..<rows).contains($0) }) {
            throw ShardmillError(.request, "token \(stray) is outside the vocabulary of \(rows)")
        }
        let count = tokens.count
        var found = HostArray(zeros: [1, columns + carry, count, 1])
        data.withUnsafeBytes { bytes in
            found.values.withUnsafeMutableBufferPointer { into in
                for (t, token) in tokens.enumerated() {
                    if let scales {
                        let scale = half(bytes, scales + 2 * token)
                        let row = start + token * columns
                        for c in 0..<columns { into[c * count + t] = Float(Int8(bitPattern: bytes[row + c])) * scale }
                    } else {
                        let row = start + token * columns * 2
                        for c in 0..<columns { into[c * count + t] = half(bytes, row + 2 * c) }
                    }
                }
            }
        }
        return found
    }
}

/// The host's table of rows for each token and layer, and the inputs that take them.
struct LayerRows: Sendable {
    private let table: Table
    /// The layer of each input.
    private let inputs: [String: Int]
    private let layers: Int

    /// Map the table `per_layer` of a build; nil if no part reads it.
    ///
    /// - Parameter columns: of the table `embedding`, whose rows the input `embedded` takes.
    /// - Throws: `ShardmillError` of kind `build` if the table does not fit the inputs.
    init?(_ manifest: Manifest, columns: Int) throws {
        func refuse(_ part: Part, _ input: String) -> ShardmillError {
            ShardmillError(.build, "model.json: \(part.name): the input '\(input)' does not fit the host's table")
        }
        let parts = manifest.parts.filter { $0.kind == .layers }
        if !parts.contains(where: {
            $0.inputs["embedded"] != nil || $0.inputs.keys.contains { Part.layer(ofRow: $0) != nil }
        }) {
            return nil
        }
        table = try Table(manifest.embedding, name: "per_layer")
        layers = table.rows / manifest.vocab
        var found: [String: Int] = [:]
        for part in parts {
            if let shape = part.inputs["embedded"], shape[1] != .fixed(columns) { throw refuse(part, "embedded") }
            for (input, shape) in part.inputs {
                guard let layer = Part.layer(ofRow: input) else { continue }
                if layer >= layers || shape[1] != .fixed(table.columns) { throw refuse(part, input) }
                found[input] = layer
            }
        }
        inputs = found
    }

    /// Return the tokens' rows for each layer by the names of inputs: p_i [1, P, T, 1].
    func arrays(_ tokens: [Int]) throws -> [String: HostArray] {
        try inputs.mapValues { layer in try table.columns(of: tokens.map { $0 * layers + layer }) }
    }
}

/// Return the little-endian fp16 number at a byte.
private func half(_ bytes: UnsafeRawBufferPointer, _ at: Int) -> Float {
    Half.float(UInt16(littleEndian: bytes.loadUnaligned(fromByteOffset: at, as: UInt16.self)))
}
