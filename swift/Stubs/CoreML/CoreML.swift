// Declarations of Apple's Core ML, as far as this package uses it, so that its files type-check where there is no Core ML.
// No body may ever run. swift/Stubs/signatures.json has Apple's declaration and page for every line, and
// tests/swift/test_signatures.py compares the two: a compile error is never mended here alone.
@_exported import Foundation

public enum MLComputeUnits: Sendable {
    case cpuOnly
    case cpuAndGPU
    case all
    case cpuAndNeuralEngine
}

public struct MLOptimizationHints: Sendable {
    public enum ReshapeFrequency: Sendable {
        case frequent
        case infrequent
    }
    public var reshapeFrequency: MLOptimizationHints.ReshapeFrequency { get { fatalError() } set { fatalError() } }
}

open class MLModelConfiguration: NSObject {
    open var computeUnits: MLComputeUnits { get { fatalError() } set { fatalError() } }
    open var functionName: String? { get { fatalError() } set { fatalError() } }
    open var modelDisplayName: String? { get { fatalError() } set { fatalError() } }
    open var optimizationHints: MLOptimizationHints { get { fatalError() } set { fatalError() } }
}

public enum MLMultiArrayDataType: Sendable {
    case float32
    case float16
}

open class MLMultiArray: NSObject {
    public init(shape: [NSNumber], dataType: MLMultiArrayDataType) throws { fatalError() }
    open var dataType: MLMultiArrayDataType { fatalError() }
    open var shape: [NSNumber] { fatalError() }
    open var strides: [NSNumber] { fatalError() }
    public func withUnsafeBytes<R>(_ body: (UnsafeRawBufferPointer) throws -> R) rethrows -> R { fatalError() }
    public func withUnsafeMutableBytes<R>(_ body: (UnsafeMutableRawBufferPointer, [Int]) throws -> R) rethrows -> R { fatalError() }
}

open class MLFeatureValue: NSObject {
    public convenience init(multiArray value: MLMultiArray) { fatalError() }
    open var multiArrayValue: MLMultiArray? { fatalError() }
}

public protocol MLFeatureProvider {
    var featureNames: Set<String> { get }
    func featureValue(for featureName: String) -> MLFeatureValue?
}

open class MLPredictionOptions: NSObject {}

open class MLMultiArrayConstraint: NSObject {
    open var dataType: MLMultiArrayDataType { fatalError() }
}

open class MLFeatureDescription: NSObject {
    open var multiArrayConstraint: MLMultiArrayConstraint? { fatalError() }
}

open class MLModelDescription: NSObject {
    open var inputDescriptionsByName: [String: MLFeatureDescription] { fatalError() }
}

public final class MLState: NSObject, @unchecked Sendable {
    public func withMultiArray<R>(for stateName: String, _ body: (MLMultiArray) throws -> R) rethrows -> R { fatalError() }
}

open class MLModel: NSObject {
    public convenience init(contentsOf url: URL, configuration: MLModelConfiguration) throws { fatalError() }
    open class func compileModel(at url: URL) async throws -> URL { fatalError() }
    open var modelDescription: MLModelDescription { fatalError() }
    open func makeState() -> MLState { fatalError() }
    open func prediction(from input: any MLFeatureProvider, options: MLPredictionOptions) throws -> any MLFeatureProvider { fatalError() }
    open func prediction(from inputFeatures: any MLFeatureProvider, using state: MLState, options: MLPredictionOptions) throws -> any MLFeatureProvider { fatalError() }
    public func prediction(from input: any MLFeatureProvider, options: MLPredictionOptions = MLPredictionOptions()) async throws -> any MLFeatureProvider { fatalError() }
    public func prediction(from input: any MLFeatureProvider, using state: MLState, options: MLPredictionOptions = MLPredictionOptions()) async throws -> any MLFeatureProvider { fatalError() }
}

public enum MLComputeDevice: Sendable {
    case cpu(MLCPUComputeDevice)
    case gpu(MLGPUComputeDevice)
    case neuralEngine(MLNeuralEngineComputeDevice)
}

public final class MLCPUComputeDevice: NSObject, @unchecked Sendable {}
public final class MLGPUComputeDevice: NSObject, @unchecked Sendable {}
public final class MLNeuralEngineComputeDevice: NSObject, @unchecked Sendable {}

public enum MLModelStructure: Sendable {
    case program(MLModelStructure.Program)
    case unsupported

    public struct Program: Sendable {
        public var functions: [String: MLModelStructure.Program.Function] { fatalError() }

        public struct Function: Sendable {
            public var block: MLModelStructure.Program.Block { fatalError() }
        }

        public struct Block: Sendable {
            public var operations: [MLModelStructure.Program.Operation] { fatalError() }
        }

        public struct Operation: Sendable {
            public var operatorName: String { fatalError() }
        }
    }
}

public class MLComputePlan {
    public struct DeviceUsage: Sendable {
        public var preferred: MLComputeDevice { fatalError() }
    }

    public static func load(contentsOf url: URL, configuration: MLModelConfiguration) async throws -> MLComputePlan { fatalError() }
    public var modelStructure: MLModelStructure { fatalError() }
    public func deviceUsage(for operation: MLModelStructure.Program.Operation) -> MLComputePlan.DeviceUsage? { fatalError() }
}

@available(*, unavailable) extension MLComputePlan: Sendable {}
