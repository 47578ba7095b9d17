// swift-tools-version: 6.0
import PackageDescription

// Without Core ML (on Linux) the files that use Apple's modules type-check against declarations of these modules, and
// programs run on the portable engine, through a pipe. No outside package is fetched there.
#if os(Linux)
let stubs: [Target] = [
    .target(name: "CoreML", path: "swift/Stubs/CoreML"),
    .target(name: "FoundationModels", path: "swift/Stubs/FoundationModels"),
]
// What of the sample app needs no SwiftUI, and the files to copy beside stubs of other packages. As in an app, they see
// public names only.
let examples: [Target] = [
    .target(name: "ChatModel", dependencies: ["Shardmill"], path: "swift/Examples/Chat/Model", packageAccess: false),
    .target(name: "AnyLanguageModel", path: "swift/Examples/Any/Stub", packageAccess: false),
    .target(
        name: "ShardmillAny", dependencies: ["Shardmill", "AnyLanguageModel"], path: "swift/Examples/Any",
        exclude: ["Stub"], packageAccess: false),
    .target(name: "Tokenizers", path: "swift/Examples/Transformers/Stub", packageAccess: false),
    .target(
        name: "TransformersCodec", dependencies: ["Shardmill", "Tokenizers"], path: "swift/Examples/Transformers",
        exclude: ["Stub"], packageAccess: false),
]
let tested: [Target.Dependency] = ["ShardmillDecode", "Shardmill", "ChatModel"]
let coreML: [Target.Dependency] = ["ShardmillDecode", "CoreML"]
let foundationModels: [Target.Dependency] = [
    "ShardmillDecode", "ShardmillText", "ShardmillCoreML", "FoundationModels",
]
#else
let stubs: [Target] = []
let examples: [Target] = []
let tested: [Target.Dependency] = ["ShardmillDecode", "Shardmill"]
let coreML: [Target.Dependency] = ["ShardmillDecode"]
let foundationModels: [Target.Dependency] = ["ShardmillDecode", "ShardmillText", "ShardmillCoreML"]
#endif

// In lists of their own: the compiler would take long to find the types of one large expression.
let ours: [Target] = [
    .target(name: "ShardmillDecode", path: "swift/Sources/Decode"),
    .target(name: "ShardmillText", dependencies: ["ShardmillDecode"], path: "swift/Sources/Text"),
    .target(name: "ShardmillCoreML", dependencies: coreML, path: "swift/Sources/CoreML"),
    .target(
        name: "Shardmill", dependencies: foundationModels,
        path: "swift/Sources/Shardmill"),
    .target(name: "ShardmillPipe", dependencies: ["ShardmillDecode"], path: "swift/Sources/Pipe"),
    .executableTarget(
        name: "shardmill-check", dependencies: ["Shardmill", "ShardmillCoreML", "ShardmillPipe"],
        path: "swift/Sources/Check"),
    .testTarget(name: "DecodeTests", dependencies: tested, path: "swift/Tests/DecodeTests"),
    .testTarget(name: "TextTests", dependencies: ["ShardmillText"], path: "swift/Tests/TextTests"),
]

let package = Package(
    name: "Shardmill",
    platforms: [.macOS(.v15), .iOS(.v18), .visionOS(.v2)],
    products: [
        .library(name: "Shardmill", targets: ["Shardmill"]),
        .executable(name: "shardmill-check", targets: ["shardmill-check"]),
    ],
    targets: stubs + examples + ours,
    swiftLanguageModes: [.v6]
)
