import CoreML
import Foundation
import ShardmillDecode

/// A Core ML array. Its rows may be padded, so every access goes by the strides.
final class CoreMLBuffer: Buffer {
    let array: MLMultiArray
    let shape: [Int]

    init(_ array: MLMultiArray) {
        self.array = array
        shape = array.shape.map(\.intValue)
    }

    func write(_ values: [Float]) throws { try write(values[...], at: 0) }

    func write(_ values: ArraySlice<Float>, at offset: Int) throws {
        let isHalf = try isHalf()
        array.withUnsafeMutableBytes { bytes, strides in
            guard let memory = bytes.baseAddress else { return }
            values.withUnsafeBufferPointer { values in
                runs(shape, strides, from: offset, count: values.count) { place, first, step, count in
                    if isHalf {
                        let elements = memory.assumingMemoryBound(to: UInt16.self) + place
                        for i in 0..<count { elements[i * step] = Half.bits(values[first + i]) }
                    } else {
                        let elements = memory.assumingMemoryBound(to: Float.self) + place
                        for i in 0..<count { elements[i * step] = values[first + i] }
                    }
                }
            }
        }
    }

    func read() throws -> [Float] {
        let isHalf = try isHalf()
        let total = shape.reduce(1, *)
        let strides = array.strides.map(\.intValue)
        return array.withUnsafeBytes { bytes in
            guard let memory = bytes.baseAddress else { return [] }
            return [Float](unsafeUninitializedCapacity: total) { into, filled in
                runs(shape, strides, from: 0, count: total) { place, first, step, count in
                    if isHalf {
                        let elements = memory.assumingMemoryBound(to: UInt16.self) + place
                        for i in 0..<count { into[first + i] = Half.float(elements[i * step]) }
                    } else {
                        let elements = memory.assumingMemoryBound(to: Float.self) + place
                        for i in 0..<count { into[first + i] = elements[i * step] }
                    }
                }
                filled = total
            }
        }
    }

    func withColumns<Result>(_ body: (Columns) throws -> Result) throws -> Result {
        let isHalf = try isHalf()
        let steps = array.strides.map(\.intValue)
        return try array.withUnsafeBytes { bytes in
            guard shape.count == 4, let memory = bytes.baseAddress else {
                throw ShardmillError(.program, "an output has the shape \(shape)")
            }
            let elements: Columns.Elements =
                isHalf
                ? .half(memory.assumingMemoryBound(to: UInt16.self))
                : .single(memory.assumingMemoryBound(to: Float.self))
            return try body(Columns(elements, channels: shape[1], channelStep: steps[1], tokenStep: steps[2]))
        }
    }

    private func isHalf() throws -> Bool {
        let kind = array.dataType
        if kind != .float16 && kind != .float32 { throw ShardmillError(.program, "an array is neither fp16 nor fp32") }
        return kind == .float16
    }
}

/// Call `body` for each run of elements of a range that lie at equal steps in memory.
///
/// The last axes are joined as long as no padding lies between them. `body` gets the first element's place in memory,
/// its number in the range, the step in memory, and the run's length.
func runs(
    _ shape: [Int], _ strides: [Int], from offset: Int, count: Int, _ body: (Int, Int, Int, Int) -> Void
) {
    var inner = 1
    var axis = shape.count
    var step = strides.last ?? 1
    while axis > 0 && (shape[axis - 1] == 1 || inner == 1 || strides[axis - 1] == inner * step) {
        if inner == 1 && shape[axis - 1] > 1 { step = strides[axis - 1] }
        inner *= shape[axis - 1]
        axis -= 1
    }
    var done = 0
    while done < count {
        let element = offset + done
        let (row, column) = (element / inner, element % inner)
        var place = column * step
        var rest = row
        for outer in stride(from: axis - 1, through: 0, by: -1) {
            place += rest % shape[outer] * strides[outer]
            rest /= shape[outer]
        }
        let length = min(inner - column, count - done)
        body(place, done, step, length)
        done += length
    }
}

/// How Core ML keeps an array: for reports, never for decisions.
package struct ArrayLayout: Codable, Equatable, Sendable {
    /// The extents of the array.
    package let shape: [Int]
    /// Elements from one entry of an axis to the next.
    package let strides: [Int]
    /// "fp16" or "fp32".
    package let elements: String
    /// Whether there is padding between the rows.
    package let isPadded: Bool

    /// Describe a buffer; nil if another back end made it.
    package init?(_ buffer: any Buffer) {
        guard let buffer = buffer as? CoreMLBuffer else { return nil }
        self.init(buffer.array)
    }

    /// Describe a state; nil if another back end made it.
    package init?(_ name: String, of state: any ProgramState) {
        guard let state = state as? CoreMLState else { return nil }
        self = state.state.withMultiArray(for: name) { ArrayLayout($0) }
    }

    private init(_ array: MLMultiArray) {
        shape = array.shape.map(\.intValue)
        strides = array.strides.map(\.intValue)
        elements = array.dataType == .float16 ? "fp16" : array.dataType == .float32 ? "fp32" : "other"
        var dense = 1
        var padded = false
        for (extent, stride) in zip(shape, strides).reversed() where extent > 1 {
            padded = padded || stride != dense
            dense *= extent
        }
        isPadded = padded
    }

    /// Return whether two buffers are one object of Core ML; nil if another back end made them.
    package static func isOneObject(_ a: any Buffer, _ b: any Buffer) -> Bool? {
        guard let a = a as? CoreMLBuffer, let b = b as? CoreMLBuffer else { return nil }
        return a.array === b.array
    }

    /// Return whether two buffers begin at one place in memory; nil if another back end made them.
    package static func isOneMemory(_ a: any Buffer, _ b: any Buffer) -> Bool? {
        guard let a = a as? CoreMLBuffer, let b = b as? CoreMLBuffer else { return nil }
        func place(_ array: MLMultiArray) -> Int { array.withUnsafeBytes { Int(bitPattern: $0.baseAddress) } }
        return place(a.array) == place(b.array)
    }
}
