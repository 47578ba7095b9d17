/// The logits of a pass, [V, T]: the rows of all LM-head parts one after the other, a column for each token.
///
/// They lie where the programs wrote them, and are valid until the next pass.
package final class Logits {
    private let parts: [any Buffer]
    /// T.
    package let tokens: Int
    /// V.
    package let vocab: Int
    private var likeliest: [Int] = []
    private let columns: ColumnMemory
    private var isTransposed = false

    /// - Parameters:
    ///   - parts: the outputs of the parts, each [1, channels, T or more, 1].
    ///   - tokens: T.
    ///   - columns: memory that no other pass's logits use as long as these are valid.
    init(_ parts: [any Buffer], tokens: Int, columns: ColumnMemory = ColumnMemory()) {
        self.parts = parts
        self.tokens = tokens
        self.columns = columns
        vocab = parts.map { $0.shape[1] }.reduce(0, +)
    }

    /// - Parameters:
    ///   - values: [V, T] in row-major order.
    ///   - tokens: T.
    package convenience init(values: [Float], tokens: Int) {
        self.init(
            [HostBuffer(HostArray(shape: [1, values.count / tokens, tokens, 1], values: values))], tokens: tokens)
    }

    /// Return the likeliest token after token t; among equals the lowest.
    package func argmax(_ t: Int) throws -> Int {
        if likeliest.isEmpty {  // all columns at once: they share the lines of memory
            var highest = [Float](repeating: -.infinity, count: tokens)
            likeliest = [Int](repeating: 0, count: tokens)
            var first = 0
            for part in parts {
                try part.withColumns { columns in
                    columns.highest(tokens) { t, value, channel in
                        if value > highest[t] { (highest[t], likeliest[t]) = (value, first + channel) }
                    }
                    first += columns.channels
                }
            }
        }
        return likeliest[t]
    }

    /// Return the first logit after each of `count` tokens.
    func firsts(_ count: Int) throws -> [Float] {
        try parts[0].withColumns { columns in (0..<count).map { columns.value(0, $0) } }
    }

    /// Return the logits [V] after token t.
    package func row(_ t: Int) throws -> [Float] {
        var found = [Float](repeating: 0, count: vocab)
        try found.withUnsafeMutableBufferPointer { if let place = $0.baseAddress { try write(t, to: place) } }
        return found
    }

    /// Write the logits [V] after token t.
    func write(_ t: Int, to row: UnsafeMutablePointer<Float>) throws {
        if tokens == 1 { return try transpose(row) }
        if !isTransposed {
            columns.resize(tokens * vocab)
            try columns.values.withUnsafeMutableBufferPointer { if let first = $0.baseAddress { try transpose(first) } }
            isTransposed = true
        }
        columns.values.withUnsafeBufferPointer {
            if let first = $0.baseAddress { row.update(from: first + t * vocab, count: vocab) }
        }
    }

    /// Write the logits as [T, V].
    private func transpose(_ rows: UnsafeMutablePointer<Float>) throws {
        var first = 0
        for part in parts {
            try part.withColumns { columns in
                columns.write(tokens, to: rows + first, rowStep: vocab)
                first += columns.channels
            }
        }
    }

    /// Return a copy that stays valid.
    func copied() throws -> Logits {
        Logits(
            try parts.map { HostBuffer(HostArray(shape: $0.shape, values: try $0.read())) }, tokens: tokens)
    }
}

/// Memory for the logits of a pass as rows, used again by the next pass: new memory would cost more than the copy.
final class ColumnMemory {
    fileprivate var values: [Float] = []

    fileprivate func resize(_ count: Int) {
        if values.count < count { values = [Float](repeating: 0, count: count) }
    }
}

/// An output [1, channels, T, 1] where it lies in memory.
package struct Columns {
    /// The first element, of an array of fp32 or fp16.
    package enum Elements {
        /// fp32.
        case single(UnsafePointer<Float>)
        /// fp16, as bits.
        case half(UnsafePointer<UInt16>)
    }

    let elements: Elements
    let channels: Int
    /// The elements from one channel to the next.
    let channelStep: Int
    /// The elements from one token to the next.
    let tokenStep: Int

    /// Describe an output.
    package init(_ elements: Elements, channels: Int, channelStep: Int, tokenStep: Int) {
        self.elements = elements
        self.channels = channels
        self.channelStep = channelStep
        self.tokenStep = tokenStep
    }

    /// Write the columns of tokens as rows.
    func write(_ tokens: Int, to rows: UnsafeMutablePointer<Float>, rowStep: Int) {
        switch elements {
        case .single(let values) where channelStep == 1 && tokens == 1: rows.update(from: values, count: channels)
        case .single(let values): write(tokens, values, to: rows, rowStep) { $0 }
        case .half(let bits): write(tokens, bits, to: rows, rowStep, Half.float)
        }
    }

    @inline(__always)
    private func write<Element>(
        _ tokens: Int, _ elements: UnsafePointer<Element>, to rows: UnsafeMutablePointer<Float>, _ rowStep: Int,
        _ number: (Element) -> Float
    ) {
        func write(_ step: Int) {
            for start in stride(from: 0, to: channels, by: 512) {  // which stay in the nearest cache for all tokens
                for t in 0..<tokens {
                    let (from, to) = (elements + t * tokenStep, rows + t * rowStep)
                    for c in start..<min(start + 512, channels) { to[c] = number(from[c &* step]) }
                }
            }
        }
        switch channelStep {  // with a step that is known, the compiler works on many channels at a time
        case 1: write(1)
        case 2: write(2)
        case 4: write(4)
        case 8: write(8)
        default: write(channelStep)
        }
    }

    /// Call `body` with each token, the largest value in its column, and the first channel that has it.
    func highest(_ tokens: Int, _ body: (Int, Float, Int) -> Void) {
        for t in 0..<tokens where !isDense(tokens) {
            var (best, channel) = (-Float.infinity, 0)
            for c in 0..<channels where value(c, t) > best { (best, channel) = (value(c, t), c) }
            body(t, best, channel)
        }
        if !isDense(tokens) { return }
        let (lanes, blocks) = maxima()
        for t in 0..<tokens {
            var (best, block) = (lanes[t], blocks[t])
            for lane in stride(from: t + channelStep, to: 16, by: channelStep) where lanes[lane] >= best {
                block = lanes[lane] > best ? blocks[lane] : min(block, blocks[lane])
                best = lanes[lane]
            }
            var channel = Int(block) / channelStep
            while channel < channels && value(channel, t) != best { channel += 1 }
            if channel == channels { channel = 0 }  // no number exceeds -infinity
            for c in (channels - channels % (16 / channelStep))..<channels where value(c, t) > best {
                (best, channel) = (value(c, t), c)
            }
            body(t, best, channel)
        }
    }

    /// Return whether a vector of 16 elements is some channels of all tokens.
    private func isDense(_ tokens: Int) -> Bool {
        (tokenStep == 1 || tokens == 1) && channelStep <= 16 && 16 % channelStep == 0
    }

    fileprivate func value(_ channel: Int, _ t: Int) -> Float {
        let place = channel * channelStep + t * tokenStep
        switch elements {
        case .single(let values): return values[place]
        case .half(let bits): return Half.float(bits[place])
        }
    }

    /// Return the largest element in each of 16 lanes, and where the block begins that has it first.
    ///
    /// The last elements, less than 16, are left out. Bits of fp16 become integers of the same order, without a
    /// conversion.
    private func maxima() -> (SIMD16<Float>, SIMD16<Int32>) {
        let (whole, size) = (channels * channelStep & ~15, 2048)
        var starts = SIMD16<Int32>()
        switch elements {
        case .single(let values):
            let raw = UnsafeRawPointer(values)
            var best = SIMD16<Float>(repeating: -.infinity)
            for start in stride(from: 0, to: whole, by: size) {
                var high = best
                for place in stride(from: start, to: min(start + size, whole), by: 16) {
                    let next = raw.loadUnaligned(fromByteOffset: 4 &* place, as: SIMD16<Float>.self)
                    high.replace(with: next, where: next .> high)
                }
                if high == best { continue }
                for lane in 0..<16 where high[lane] > best[lane] { starts[lane] = Int32(start) }
                best = high
            }
            return (best, starts)
        case .half(let bits):
            let raw = UnsafeRawPointer(bits)
            let magnitude = SIMD16<Int16>(repeating: 0x7FFF)
            let negative = SIMD16<Int16>()
            var best = SIMD16<Int16>(repeating: -0x7C00)
            for start in stride(from: 0, to: whole, by: size) {
                var high = best
                for place in stride(from: start, to: min(start + size, whole), by: 16) {
                    let next = raw.loadUnaligned(fromByteOffset: 2 &* place, as: SIMD16<Int16>.self)
                    let size = next & magnitude
                    let key = size.replacing(with: negative &- size, where: next .< negative)
                    high.replace(with: key, where: key .> high)
                }
                if high == best { continue }
                for lane in 0..<16 where high[lane] > best[lane] { starts[lane] = Int32(start) }
                best = high
            }
            var found = SIMD16<Float>()
            for lane in 0..<16 {
                found[lane] = Half.float(UInt16(abs(best[lane])) | (best[lane] < 0 ? 0x8000 : 0))
            }
            return (found, starts)
        }
    }
}
