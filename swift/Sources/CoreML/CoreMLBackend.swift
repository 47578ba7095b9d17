import CoreML
import Foundation
import ShardmillDecode

#if !canImport(ObjectiveC)
/// Outside Apple's systems there is no pool to drain.
func autoreleasepool<Result>(invoking body: () throws -> Result) rethrows -> Result { try body() }
#endif

/// Programs on Core ML, which runs them on the Neural Engine.
///
/// One thread uses it at a time. Core ML never sees an array that is being written: inputs are the package's own, made
/// once, and outputs are copied before the next pass.
public final class CoreMLBackend: Backend {
    private let bundles: [String: URL]
    private let units: MLComputeUnits
    private let reshape: String

    /// - Parameters:
    ///   - bundles: for each part's name, the compiled bundle that this system may load; see `Compiler`.
    ///   - manifest: the build's model.json.
    ///   - units: where programs may run; anything else than the default is the caller's explicit choice.
    public init(bundles: [String: URL], manifest: Manifest, units: MLComputeUnits = .cpuAndNeuralEngine) {
        self.bundles = bundles
        self.units = units
        reshape = manifest.reshapeFrequency
    }

    public func load(_ part: Part, function: String) throws -> any LoadedFunction {
        let configuration = MLModelConfiguration()
        configuration.computeUnits = units
        configuration.modelDisplayName = part.name
        var url = bundles[part.name] ?? part.program
        if let own = part.bundles[function], bundles[part.name] == nil {
            url = own
        } else if !function.isEmpty {
            configuration.functionName = function
        }
        if part.functions.isEmpty {  // one function takes every width
            configuration.optimizationHints.reshapeFrequency = reshape == "frequent" ? .frequent : .infrequent
        }
        do {
            return CoreMLFunction(try MLModel(contentsOf: url, configuration: configuration), name: part.name)
        } catch {
            throw ShardmillError(.program, "\(part.name) can't be loaded: \(error.localizedDescription)")
        }
    }
}

/// A loaded function, and the provider that hands it its inputs.
private final class CoreMLFunction: LoadedFunction {
    private let model: MLModel
    private let name: String
    private let provider = Inputs()
    private let options = MLPredictionOptions()

    init(_ model: MLModel, name: String) {
        self.model = model
        self.name = name
    }

    func makeState() throws -> any ProgramState { CoreMLState(model.makeState()) }

    func makeBuffer(_ input: String, shape: [Int]) throws -> any Buffer {
        let kind = model.modelDescription.inputDescriptionsByName[input]?.multiArrayConstraint?.dataType ?? .float16
        let array = try MLMultiArray(shape: shape.map { NSNumber(value: $0) }, dataType: kind == .float32 ? .float32 : .float16)
        let buffer = CoreMLBuffer(array)
        try buffer.write([Float](repeating: 0, count: shape.reduce(1, *)))
        return buffer
    }

    func run(_ inputs: [String: any Buffer], state: (any ProgramState)?) throws -> [String: any Buffer] {
        for (name, buffer) in inputs { provider.set(name, (buffer as! CoreMLBuffer)) }  // this back end made every buffer
        do {
            // Without the pool, the Neural Engine's few output ports run out after some passes.
            return try autoreleasepool {
                let found =
                    if let state = state as? CoreMLState {
                        try model.prediction(from: provider, using: state.state, options: options)
                    } else {
                        try model.prediction(from: provider, options: options)
                    }
                var outputs: [String: any Buffer] = [:]
                for output in found.featureNames {
                    guard let array = found.featureValue(for: output)?.multiArrayValue else { continue }
                    outputs[output] = CoreMLBuffer(array)
                }
                return outputs
            }
        } catch {
            throw ShardmillError(.program, "\(name) can't be run: \(error.localizedDescription)")
        }
    }
}

/// One provider for all passes of a function: a new dictionary for every pass would cost more than the pass's arrays.
private final class Inputs: NSObject, MLFeatureProvider {
    private var values: [String: MLFeatureValue] = [:]
    private var buffers: [String: CoreMLBuffer] = [:]

    var featureNames: Set<String> { Set(values.keys) }

    func featureValue(for featureName: String) -> MLFeatureValue? { values[featureName] }

    func set(_ name: String, _ buffer: CoreMLBuffer) {
        if buffers[name] === buffer { return }
        buffers[name] = buffer
        values[name] = MLFeatureValue(multiArray: buffer.array)
    }
}

/// The states of a program. They are never touched while a prediction runs.
private final class CoreMLState: ProgramState {
    let state: MLState

    init(_ state: MLState) { self.state = state }

    func read(_ name: String) throws -> HostArray {
        try state.withMultiArray(for: name) { array in
            let buffer = CoreMLBuffer(array)
            return HostArray(shape: buffer.shape, values: try buffer.read())
        }
    }

    func write(_ name: String, _ array: HostArray) throws {
        try state.withMultiArray(for: name) { try CoreMLBuffer($0).write(array.values) }
    }
}

/// A Core ML array. Its rows may be padded, so every access goes by the strides.
private final class CoreMLBuffer: Buffer {
    let array: MLMultiArray
    let shape: [Int]

    init(_ array: MLMultiArray) {
        self.array = array
        shape = array.shape.map(\.intValue)
    }

    func write(_ values: [Float]) throws { try write(values[...], at: 0) }

    func write(_ values: ArraySlice<Float>, at offset: Int) throws {
        let kind = try kind()
        array.withUnsafeMutableBytes { bytes, strides in
            values.withUnsafeBufferPointer { values in
                runs(strides, from: offset, count: values.count) { place, first, step, count in
                    if kind == .float16 {
                        let elements = bytes.baseAddress!.assumingMemoryBound(to: Float16.self) + place
                        for i in 0..<count { elements[i * step] = Float16(values[first + i]) }
                    } else {
                        let elements = bytes.baseAddress!.assumingMemoryBound(to: Float.self) + place
                        for i in 0..<count { elements[i * step] = values[first + i] }
                    }
                }
            }
        }
    }

    func read() throws -> [Float] {
        let kind = try kind()
        let total = shape.reduce(1, *)
        let strides = array.strides.map(\.intValue)
        return array.withUnsafeBytes { bytes in
            [Float](unsafeUninitializedCapacity: total) { into, filled in
                runs(strides, from: 0, count: total) { place, first, step, count in
                    if kind == .float16 {
                        let elements = bytes.baseAddress!.assumingMemoryBound(to: Float16.self) + place
                        for i in 0..<count { into[first + i] = Float(elements[i * step]) }
                    } else {
                        let elements = bytes.baseAddress!.assumingMemoryBound(to: Float.self) + place
                        for i in 0..<count { into[first + i] = elements[i * step] }
                    }
                }
                filled = total
            }
        }
    }

    private func kind() throws -> MLMultiArrayDataType {
        let kind = array.dataType
        if kind != .float16 && kind != .float32 { throw ShardmillError(.program, "an array is neither fp16 nor fp32") }
        return kind
    }

    /// Call `body` for each run of elements along the last axis: its place in memory, the first element's number in the
    /// range, the step in memory, and the run's length. The last axes are joined as long as no padding lies between them.
    private func runs(_ strides: [Int], from offset: Int, count: Int, _ body: (Int, Int, Int, Int) -> Void) {
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
}
