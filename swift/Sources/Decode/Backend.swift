/// The seam between this package and what runs programs: Core ML on a device, a pipe to the portable engine in tests.
///
/// Everything here is synchronous, and used by one thread at a time. Loading may take minutes on a device, so the
/// caller is expected to run on a thread of its own (`ModelActor` in the module Shardmill does).
package protocol Backend: AnyObject {
    /// Load one function of a part's program.
    ///
    /// - Parameters:
    ///   - part: the part's entry in model.json.
    ///   - function: the function's name; empty for a program's only function.
    func load(_ part: Part, function: String) throws -> any LoadedFunction
}

/// One function of a program, ready to run.
package protocol LoadedFunction: AnyObject {
    /// Make states of zeros. All functions of a part at one context length share the states of the first one.
    func makeState() throws -> any ProgramState

    /// Make an input of zeros, in memory that the back end may hand to the device.
    func makeBuffer(_ input: String, shape: [Int]) throws -> any Buffer

    /// Run the function. The outputs are valid until the next run.
    func run(_ inputs: [String: any Buffer], state: (any ProgramState)?) throws -> [String: any Buffer]
}

/// The states of a program: its key/value cache and its convolutions' rings.
package protocol ProgramState: AnyObject {
    /// Return a copy of a state.
    func read(_ name: String) throws -> HostArray
    /// Replace a state.
    func write(_ name: String, _ array: HostArray) throws
}

/// An array in the back end's memory, whose elements may be fp16 or fp32.
package protocol Buffer: AnyObject {
    /// The extents.
    var shape: [Int] { get }
    /// Replace all elements, in row-major order.
    func write(_ values: [Float]) throws
    /// Replace the elements from `offset` on along the row-major order.
    func write(_ values: ArraySlice<Float>, at offset: Int) throws
    /// Return all elements, in row-major order.
    func read() throws -> [Float]
    /// Call `body` with the elements of an output [1, channels, T, 1] where they lie, without a copy.
    func withColumns<Result>(_ body: (Columns) throws -> Result) throws -> Result
}

/// An array in the host's own memory, for back ends without a device.
package final class HostBuffer: Buffer {
    /// The array.
    package private(set) var array: HostArray

    /// Hold an array.
    package init(_ array: HostArray) { self.array = array }

    /// The extents.
    package var shape: [Int] { array.shape }

    package func write(_ values: [Float]) throws { array.values = values }

    package func write(_ values: ArraySlice<Float>, at offset: Int) throws {
        array.values.replaceSubrange(offset..<offset + values.count, with: values)
    }

    package func read() throws -> [Float] { array.values }

    package func withColumns<Result>(_ body: (Columns) throws -> Result) throws -> Result {
        let (channels, tokens) = (array.shape[1], array.shape[2])
        return try array.values.withUnsafeBufferPointer { values in
            guard let first = values.baseAddress else { throw ShardmillError(.program, "an output is empty") }
            return try body(Columns(.single(first), channels: channels, channelStep: tokens, tokenStep: 1))
        }
    }
}

/// A host's array of fp32 numbers, in row-major order.
package struct HostArray: Equatable, Sendable {
    /// The extents.
    package var shape: [Int]
    /// The elements, in row-major order.
    package var values: [Float]

    /// Make an array of elements in row-major order; there must be as many as the shape says.
    package init(shape: [Int], values: [Float]) {
        self.shape = shape
        self.values = values
    }

    /// Make an array of zeros.
    package init(zeros shape: [Int]) {
        self.init(shape: shape, values: [Float](repeating: 0, count: shape.reduce(1, *)))
    }

    /// Return the array with `width` entries along an axis: the last entry is repeated, or zeros are added.
    func padded(axis: Int, to width: Int, withZeros: Bool) -> HostArray {
        let count = shape[axis]
        if count == width { return self }
        let inner = shape[(axis + 1)...].reduce(1, *)
        let outer = shape[..<axis].reduce(1, *)
        var found = HostArray(zeros: shape)
        found.shape[axis] = width
        found.values = [Float](repeating: 0, count: outer * width * inner)
        for row in 0..<outer {
            let from = row * count * inner
            let to = row * width * inner
            found.values.replaceSubrange(to..<to + count * inner, with: values[from..<from + count * inner])
            if withZeros { continue }
            for added in count..<width {
                let last = from + (count - 1) * inner
                let place = to + added * inner
                found.values.replaceSubrange(place..<place + inner, with: values[last..<last + inner])
            }
        }
        return found
    }

    /// Return the first `count` tokens of an output [1, channels, T, 1].
    func firstTokens(_ count: Int) -> HostArray {
        let tokens = shape[2]
        if tokens == count { return self }
        var found = [Float]()
        found.reserveCapacity(shape[1] * count)
        for channel in 0..<shape[1] { found += values[channel * tokens..<channel * tokens + count] }
        return HostArray(shape: [1, shape[1], count, 1], values: found)
    }

    /// Copy the contents of another cache [1, ., slots, .] of the same layer, as far as both reach along the slots.
    mutating func carry(from before: HostArray) {
        let rows = min(before.shape[2], shape[2])
        let inner = shape[3]
        for head in 0..<shape[0] * shape[1] {
            let from = head * before.shape[2] * inner
            let to = head * shape[2] * inner
            values.replaceSubrange(to..<to + rows * inner, with: before.values[from..<from + rows * inner])
        }
    }
}
